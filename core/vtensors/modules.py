"""The modules of a checkpoint: what was claimed, what is declared, and where the two disagree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from vtensors.claim_reasons import Claimant
from vtensors.records import Claim, Conflict, DeclaredScheme
from vtensors.tensors import TensorInfo

_FAMILY = {"bf16": "unquantized", "f16": "unquantized", "f32": "unquantized"}
_EMBEDDINGS = ("embed_tokens", "embeddings", "wte", "tok_embeddings", "pos_embed")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@attrs.frozen(kw_only=True, slots=True)
class Module:
    """One weight of a checkpoint.

    name, convention, scheme: who wrote it and what it is. shape: (N, K), or the tensor's own shape.
    declared: activation precision that is declared, `16bit`, `fp4`, `fp8-static` or `fp8-dynamic`.
    declared_scheme: everything the configuration says of it, None where it says nothing.
    nbytes: stored bytes of its tensors (its share of a stacked tensor).
    """

    name: str
    scheme: str
    convention: str
    shape: tuple[int, ...]
    declared: str
    nbytes: int
    claim: Claim
    declared_scheme: DeclaredScheme | None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Full names of the tensors that make up the module, codes first."""
        return tuple(info.name for info in self.claim.roles.values())

    @property
    def algorithm(self) -> str:
        """The publisher's own word for the declared scheme, `` where nothing is declared."""
        return self.declared_scheme.algorithm if self.declared_scheme is not None else ""


def make_modules(claims: Mapping[str, Claim], claimants: Sequence[Claimant]) -> dict[str, Module]:
    """Modules by name, each with the first declaration that speaks of it."""
    speakers = [c.declaration for c in claimants if c.declaration is not None and c.declaration.summary]
    modules = {}
    for name, claim in claims.items():
        declared = claim.declared
        if declared is None:
            declared = next(
                (found for d in speakers if (found := d.scheme_of(name)) is not None),
                None,
            )
        modules[name] = Module(
            name=name,
            scheme=claim.scheme,
            convention=claim.convention,
            shape=claim.shape,
            declared=declared.activations if declared is not None and is_quantized(claim.scheme) else "16bit",
            nbytes=_stored_bytes(claim),
            claim=claim,
            declared_scheme=declared,
        )
    return modules


def is_quantized(scheme: str) -> bool:
    """Whether the scheme is anything but plain floats."""
    return scheme not in _FAMILY


def _stored_bytes(claim: Claim) -> int:
    if claim.part is None:
        return sum(info.nbytes for info in claim.roles.values())
    codes = claim.codes
    rows = codes.shape[2] if claim.part.transposed else codes.shape[1]
    whole = codes.shape[0] * rows
    share = claim.part.row_end - claim.part.row_begin
    return sum(info.nbytes * share // whole for info in claim.roles.values())


# --- declared against found -------------------------------------------------------------------------------


def find_conflicts(modules: Iterable[Module]) -> tuple[Conflict, ...]:
    """Modules whose declaration and tensors disagree; the tensors win. Alike ones are counted together."""
    counted: dict[tuple[str, str, str], list[str]] = {}
    for module in modules:
        found = _disagreement(module)
        if found is not None:
            pattern = _NUMBER.sub(".*", module.name)
            counted.setdefault((pattern, *found), []).append(module.name)
    return tuple(
        Conflict(
            where=names[0] if len(names) == 1 else f"{pattern} (first: {names[0]})",
            says=says,
            instead=instead,
            chosen="the tensors of the file",
            modules=len(names),
        )
        for (pattern, says, instead), names in counted.items()
    )


def _disagreement(module: Module) -> tuple[str, str] | None:
    """(what the configuration says, what the file holds), or None where they agree."""
    declared, claim = module.declared_scheme, module.claim
    found = f"{module.scheme} ({', '.join(_short(info) for info in claim.roles.values())})"
    if not is_quantized(module.scheme):
        if declared is None or declared.weight == "unquantized" or not _is_linear(module, declared):
            return None
        return f"{declared.algorithm} ({declared.where})", found
    if declared is None:
        return ("nothing is declared", found)
    if declared.algorithm.lower() not in claim.form.algorithms and claim.form.algorithms:
        return f"{declared.algorithm} ({declared.where})", found
    return None


def _is_linear(module: Module, declared: DeclaredScheme) -> bool:
    """Whether a declaration by class or by default can mean this plain module at all."""
    last = module.name.rpartition(".")[2]
    codes = module.claim.codes.name
    is_matrix = len(module.shape) == 2 and (codes.endswith(".weight") or module.claim.part is not None)
    return is_matrix and (declared.explicit or last not in _EMBEDDINGS)


def _short(info: TensorInfo) -> str:
    return f"{info.name.rpartition('.')[2]} {info.dtype}"
