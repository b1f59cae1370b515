"""The self-test of paged attention: decode and prefill against the reference, over pages with NaN beyond each end."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors_formats import e4m3
from vtensors_kernels.reference.paged_attention import PAGE_TOKENS, AttentionShape, paged_attention
from vtensors_kernels.reference.rope import rope_angles
from vtensors_kernels.steps.paged_attention import FINE_TOKENS, PagedAttention

# Of ||y - reference|| / ||reference||: rounding the result gives 1.7e-3 (2.1e-4 in float16), and scales of an E4M3
# cache that are no powers of two as much again, since the reference rounds what the cache gives back and the kernel
# scales sums. Prefill rounds the weights of the softmax and rounds before the gate.
DECODE_LIMITS = {torch.bfloat16: 5e-3, torch.float16: 7e-4}
PREFILL_LIMITS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
# Old tokens: none; the ends of a page; several splits of one page and of two.
_OLD = (0, 62, 63, 64, 200, FINE_TOKENS + 130)
_CHUNK = (70, 75)  # old tokens and new ones


@attrs.frozen(kw_only=True, eq=False)
class PagedCase:
    """Sequences of random old tokens in pages in no order, and new tokens for each.

    q: [B * new, H * D] or gated [B * new, H * 2 * D], k, v: [B * new, KV * D]: columns of one matrix. k_pages,
    v_pages: NaN wherever there is no old token; page 0 is no sequence's. page_table: [B, P]. positions: [B] old tokens.
    """

    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    positions: Tensor
    cos_sin: Tensor
    new: int

    @classmethod
    def make(
        cls, shape: AttentionShape, old: Sequence[int], device: torch.device, *, new: int = 1, seed: int = 0
    ) -> PagedCase:
        """old: tokens of each sequence. new: of each."""
        source = torch.Generator(device).manual_seed(seed)
        rows, dim, dtype = len(old), shape.head_dim, shape.dtype
        most = -(-(max(old) + new) // PAGE_TOKENS)
        table = (torch.randperm(rows * most, generator=source, device=device) + 1).view(rows, most)
        pools = []
        for scale in shape.kv_scales or (None, None):
            size = (rows * most + 1, shape.kv_heads, PAGE_TOKENS, dim)
            pool = torch.randn(size, generator=source, device=device)
            stored = pool.to(dtype) if scale is None else e4m3.encode(pool / scale)
            kept = torch.zeros(rows * most + 1, PAGE_TOKENS, dtype=torch.bool, device=device)
            for row, count in enumerate(old):
                places = torch.arange(most * PAGE_TOKENS, device=device).view(most, PAGE_TOKENS)
                kept[table[row]] = places < count
            if scale is None:
                stored.masked_fill_(~kept[:, None, :, None], float("nan"))
            else:
                e4m3.as_bytes(stored).masked_fill_(~kept[:, None, :, None], 0x7F)
            pools.append(stored)
        widths = [shape.heads * dim * (2 if shape.gated else 1), shape.kv_heads * dim, shape.kv_heads * dim]
        projected = torch.randn(rows * new, sum(widths), generator=source, device=device)
        q, k, v = torch.split(projected.to(dtype), widths, dim=1)
        frequencies = 10_000.0 ** -torch.linspace(0, 1, shape.rotary_dim // 2)
        return cls(
            shape=shape,
            q=q,
            k=k,
            v=v,
            k_pages=pools[0],
            v_pages=pools[1],
            page_table=table.to(torch.int32),
            positions=torch.tensor(old, dtype=torch.int32, device=device),
            cos_sin=torch.cat(rope_angles(torch.arange(most * PAGE_TOKENS), frequencies), dim=1).to(device),
            new=new,
        )

    def wanted(self) -> tuple[Tensor, Tensor, Tensor]:
        """float32 [B * new, H * D] of the reference, not rounded, and the pages after it; the case stays as it is."""
        k_pages, v_pages = _copy(self.k_pages), _copy(self.v_pages)
        parts = []
        for row, start in enumerate(self.positions.tolist()):
            own = slice(row * self.new, (row + 1) * self.new)
            parts.append(
                paged_attention(
                    self.shape,
                    self.q[own],
                    self.k[own],
                    self.v[own],
                    k_pages,
                    v_pages,
                    self.page_table[row],
                    start,
                    self.cos_sin,
                )
            )
        return torch.cat(parts), k_pages, v_pages

    def decode(self, attention: PagedAttention, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel's result for those rows and the pages after it; the case stays as it is."""
        k_pages, v_pages = _copy(self.k_pages), _copy(self.v_pages)
        q, k, v = self.q[rows], self.k[rows], self.v[rows]
        table, positions = self.page_table[rows], self.positions[rows]
        out = torch.full((q.shape[0], self.shape.heads * self.shape.head_dim), float("nan"), device=q.device)
        out = out.to(q.dtype)
        attention.decode(q, k, v, k_pages, v_pages, table, positions, self.cos_sin, out=out)
        return out, k_pages, v_pages

    def prefill(self, attention: PagedAttention) -> tuple[Tensor, Tensor, Tensor]:
        """The same for the new tokens of the only sequence."""
        k_pages, v_pages = _copy(self.k_pages), _copy(self.v_pages)
        start = int(self.positions[0])
        out = attention.prefill(
            self.q, self.k, self.v, k_pages, v_pages, self.page_table, start, self.cos_sin
        )
        return out, k_pages, v_pages


def probe_paged_attention(attention: PagedAttention, *, seed: int = 0) -> None:
    """Raises VtensorsError where decode or prefill is off from the reference, or a row depends on its neighbours."""
    shape = attention.shape
    longest = attention.max_positions - 1
    old = tuple(dict.fromkeys(min(count, longest) for count in _OLD))
    case = PagedCase.make(shape, old, attention.device, seed=seed)
    found = case.decode(attention)
    _compare(found, case.wanted(), shape, DECODE_LIMITS[shape.dtype], f"decode after {old} tokens")
    for row in range(len(old)):
        if not torch.equal(case.decode(attention, slice(row, row + 1))[0], found[0][row : row + 1]):
            raise VtensorsError(
                "the self-test of paged attention failed: a row's result depends on the others",
                seen=f"{old[row]} tokens before it, alone and among {len(old)} rows",
            )
    for start, new in ((0, min(sum(_CHUNK), longest)), _CHUNK):
        if start + new <= attention.max_positions:
            case = PagedCase.make(shape, (start,), attention.device, new=new, seed=seed)
            found, limit = case.prefill(attention), PREFILL_LIMITS[shape.dtype]
            _compare(found, case.wanted(), shape, limit, f"prefill of {new} tokens after {start}")


def relative_errors(
    found: tuple[Tensor, Tensor, Tensor], wanted: tuple[Tensor, Tensor, Tensor]
) -> dict[str, float]:
    """||found - wanted|| / ||wanted|| of the result's worst row and of all pages; infinite where NaN differ."""
    rows = (found[0].float() - wanted[0]).norm(dim=1) / wanted[0].norm(dim=1)
    errors = {"result": float(torch.nan_to_num(rows, nan=float("inf")).max())}
    for name, own, other in (("keys", found[1], wanted[1]), ("values", found[2], wanted[2])):
        own, other = own.float(), other.float()
        same = torch.equal(own.isnan(), other.isnan())
        error = (own - other).nan_to_num(nan=0.0).norm() / other.nan_to_num(nan=0.0).norm()
        errors[name] = float(error) if same else float("inf")
    return errors


def rounding_errors(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows] float32: ||rounded - wanted|| / ||wanted||, what a result that is right before its rounding has."""
    errors: Tensor = (wanted.to(dtype).float() - wanted).norm(dim=1) / wanted.norm(dim=1)
    return errors


def _compare(
    found: tuple[Tensor, Tensor, Tensor],
    wanted: tuple[Tensor, Tensor, Tensor],
    shape: AttentionShape,
    limit: float,
    what: str,
) -> None:
    for name, error in relative_errors(found, wanted).items():
        if not error < limit:
            raise VtensorsError(
                f"the self-test of paged attention failed: {name} of {what}",
                seen=f"relative error {error:.1e}; {shape.heads} heads, {shape.kv_heads} of keys and values, "
                f"{shape.head_dim} dimensions, {shape.dtype}, scales {shape.kv_scales}",
                accepted=f"{limit}",
            )


def _copy(pages: Tensor) -> Tensor:
    return e4m3.as_bytes(pages).clone().view(pages.dtype) if pages.element_size() == 1 else pages.clone()
