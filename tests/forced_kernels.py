"""Which kernels are forced in turn over the checkpoints of the tests, and which must then serve.

A profile forces one way of computing for every scheme at once. Import as `from forced_kernels import PROFILES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from vtensors.records import KernelRequest

# Scheme -> how the names of its kernels go on behind the op.
FAMILIES = {
    "nvfp4": "nvfp4",
    **dict.fromkeys(("fp8-tensor", "fp8-row", "fp8-block", "mxfp8"), "fp8"),
    **dict.fromkeys(("bf16", "f16"), "plain"),
}
# Kernels without a form for a scheme: sums that a scale of a block or of a token would have to multiply.
_NO_FORM = frozenset(
    {
        ("fp8-block", "fp8_wgmma_segments"),
        ("fp8-block", "fp8_wgmma_segments_in_parts"),
        ("fp8-block", "fp8_widening"),
        ("fp8-block", "fp8_w8a8"),
        ("mxfp8", "fp8_widening"),
        ("mxfp8", "fp8_w8a8"),
        ("mxfp8", "fp8_w8a8_block"),
        ("fp8-tensor", "fp8_w8a8_block"),
        ("fp8-row", "fp8_w8a8_block"),
    }
)
_BLOCK, _BLOCK_COLUMNS = "fp8_w8a8_block", 512


@attrs.frozen(kw_only=True)
class Profile:
    """kernels: (family, activations that run) -> names of kernels behind the op, which `VT_KERNELS` asks for."""

    name: str
    kernels: Mapping[tuple[str, str], tuple[str, ...]]
    hopper: bool = False

    def switch(self, requests: Iterable[KernelRequest]) -> str:
        """The value of VT_KERNELS for a model of these requests; empty where the profile has nothing for it."""
        rules: dict[str, None] = {}
        for request in requests:
            for kernel in self._known(request):
                rules[f"{request.scheme}:*_{kernel}"] = None
                # What the kernel is not for: the embedding beside plain linears, weights of other widths.
                if beside := {"plain_small": "embedding_plain", "plain_cublas": "embedding_plain"}.get(
                    kernel, "linear_reference" if kernel == _BLOCK else ""
                ):
                    rules[f"{request.scheme}:{beside}"] = None
        return ",".join(rules)

    def expected(self, request: KernelRequest) -> tuple[str, ...]:
        """The kernels that must serve the request, of what the switch forces."""
        return tuple(f"{request.op}_{kernel}" for kernel in self._known(request))

    def _known(self, request: KernelRequest) -> tuple[str, ...]:
        if request.op == "embedding":
            return ()
        found = self.kernels.get((FAMILIES.get(request.scheme, ""), request.activations), ())
        return tuple(kernel for kernel in found if _has_form(kernel, request))


def _has_form(kernel: str, request: KernelRequest) -> bool:
    if (request.scheme, kernel) in _NO_FORM:
        return False
    if kernel == _BLOCK:
        return request.shape is not None and request.shape[1] % _BLOCK_COLUMNS == 0
    if "emulated_wgmma" in kernel:
        # No sums of a token are scaled there, and no blocks.
        by_token = request.activations == "fp8-dynamic" and request.scheme != "mxfp8"
        return request.scheme != "fp8-block" and not by_token
    return True


def _profile(name: str, *, hopper: bool = False, **kernels: tuple[str, ...]) -> Profile:
    """kernels: `nvfp4`, `fp8`, `plain` for 16-bit activations."""
    return Profile(
        name=name,
        kernels={
            (family, "16bit"): tuple(f"{family}_{kernel}" for kernel in names)
            for family, names in kernels.items()
        },
        hopper=hopper,
    )


def _emulated(name: str, *, hopper: bool = False, nvfp4: tuple[str, ...], fp8: tuple[str, ...]) -> Profile:
    return Profile(
        name=f"emulated-{name}",
        kernels={
            ("nvfp4", "fp4"): tuple(f"nvfp4_w4a4_emulated_{kernel}" for kernel in nvfp4),
            ("nvfp4", "fp8-static"): tuple(f"nvfp4_w4a8_emulated_{kernel}" for kernel in nvfp4),
            **{
                ("fp8", mode): tuple(f"fp8_w8a8_emulated_{kernel}" for kernel in fp8)
                for mode in ("fp8-static", "fp8-dynamic")
            },
        },
        hopper=hopper,
    )


_SEGMENTS = ("wgmma_segments", "wgmma_segments_in_parts")
# With 16-bit activations.
PROFILES = (
    _profile("stream", nvfp4=("stream",), fp8=("stream", "stream_in_parts"), plain=("small", "small_more")),
    _profile("segments", nvfp4=("wgmma_segments", "wgmma"), fp8=_SEGMENTS, hopper=True),
    _profile("packed_widening", nvfp4=("packed_widening",), fp8=("packed_widening",), plain=("cublas",)),
    _profile("stored", nvfp4=("stored",), fp8=("widening",)),
    _profile("widening", nvfp4=("widening",)),
)
# With activations as declared.
DECLARED = (
    _emulated("stream", nvfp4=("stream",), fp8=("stream", "stream_in_parts")),
    _emulated("segments", nvfp4=("wgmma_segments", "wgmma"), fp8=_SEGMENTS, hopper=True),
    _emulated("packed_widening", nvfp4=("packed_widening",), fp8=("packed_widening",)),
    Profile(
        name="native",
        kernels={("fp8", mode): ("fp8_w8a8", "fp8_w8a8_block") for mode in ("fp8-static", "fp8-dynamic")},
    ),
)
