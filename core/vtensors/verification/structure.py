"""What headers and configuration alone show: everything that a load refuses, and what it lets pass."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from vtensors.checkpoint import Checkpoint
from vtensors.claim_reasons import Unclaimed
from vtensors.configs import CONFIG
from vtensors.counts import counted
from vtensors.declaring import stale_entries
from vtensors.errors import ArchitectureError, VtensorsError
from vtensors.forms import FLOAT_DTYPES
from vtensors.grouping import Grouped, group_tensors, kv_owner
from vtensors.matching import HEADS, nearest
from vtensors.modules import Module, is_quantized
from vtensors.verification.findings import Finding, finding, finding_of
from vtensors.verification.opening import Opened

INPUT_ROLES = ("input_scale", "input_divisor")
# Names are compared one by one with all modules, so the nearest is looked up for so many entries only.
_NEAREST = 10


def structure_findings(opened: Opened) -> list[Finding]:
    """Every finding that needs no weight byte, those of opening first."""
    found = list(opened.findings)
    checkpoint = opened.checkpoint
    if checkpoint is None:
        return found
    grouped = group_tensors(checkpoint.snapshot.tensors.values())
    lost = {name.rpartition(".")[0] for name in opened.lost}
    refused = any(f.code == "refused-declaration" for f in found)
    found.extend(_unclaimed(checkpoint, lost, quiet=refused))
    found.extend(_problems(checkpoint, grouped, lost))
    found.extend(_conflicts(checkpoint))
    found.extend(_stale(checkpoint, opened.lost))
    found.extend(_activation_scales(checkpoint, opened.lost))
    found.extend(_kv(checkpoint, grouped, opened.lost))
    told = any(f.code == "refused-model" or (f.code, f.tensor) == ("damaged-config", CONFIG) for f in found)
    if checkpoint.plan is None and not told:
        found.append(
            finding(
                "unknown-architecture", CONFIG, seen=f"{checkpoint.architecture_name}: no plugin knows it"
            )
        )
    found.extend(finding("failed-convention", CONFIG, seen=text) for text in checkpoint.declaring_warnings)
    found.extend(finding("failed-convention", CONFIG, seen=text) for text in checkpoint.claims.warnings)
    for claimant in checkpoint.claimants:
        for text in claimant.declaration.warnings if claimant.declaration else ():
            found.append(finding("convention-note", CONFIG, seen=text))
    return found


# --- tensors that nobody reads -----------------------------------------------------------------------------


def _unclaimed(checkpoint: Checkpoint, lost: set[str], *, quiet: bool) -> Iterator[Finding]:
    """quiet: the declaration was refused, so that only what is wrong without one is said."""
    left = set(checkpoint.accounting.unclaimed)
    for name, unclaimed in checkpoint.claims.unclaimed.items():
        tensors = list(unclaimed.group.tensors.values())
        code = _unclaimed_code(unclaimed)
        waived = not any(info.name in left for info in tensors)
        if name in lost or (waived and code != "unscaled-fp8") or (quiet and code != "unscaled-fp8"):
            continue
        why = "; ".join(f"{convention}: {reason}" for convention, reason in unclaimed.reasons)
        for info in tensors:
            if info.name in left or code == "unscaled-fp8":
                yield finding(code, info.name, seen=f"{info.describe()} ({why})")


def _unclaimed_code(unclaimed: Unclaimed) -> str:
    tensors = unclaimed.group.tensors
    if unclaimed.contested:
        return "claimed-twice"
    is_fp8 = any(info.dtype.startswith(("F8_E4M3", "F8_E5M2")) for info in tensors.values())
    if is_fp8 and not any("scale" in suffix for suffix in tensors):
        return "unscaled-fp8"
    if any("no configuration file declares" in reason for _, reason in unclaimed.reasons):
        return "undeclared-quantization"
    return "unread-tensor"


# --- what a load refuses -----------------------------------------------------------------------------------


def _problems(checkpoint: Checkpoint, grouped: Grouped, lost: set[str]) -> Iterator[Finding]:
    repeated = {second for _, second in (*grouped.duplicates, *checkpoint.claims.repeated)}
    kv = {info.name for scales in grouped.kv_scales.values() for info in scales.values()}
    owners: dict[str, list[Module]] = {}
    for module in checkpoint.modules.values() if checkpoint.accounting.problems else ():
        for tensor in module.tensors:
            owners.setdefault(tensor, []).append(module)
    for problem in checkpoint.accounting.problems:
        name = problem.tensor or ""
        if name in checkpoint.claims.unclaimed and not isinstance(problem, ArchitectureError):
            continue
        code = _problem_code(problem, checkpoint, owners.get(name, ()), repeated, kv)
        if code in ("missing-weight", "missing-bias") and _is_lost(name, lost):
            continue
        yield finding_of(code, problem)


def _problem_code(
    problem: VtensorsError, checkpoint: Checkpoint, owners: Sequence[Module], repeated: set[str], kv: set[str]
) -> str:
    name = problem.tensor or ""
    info = checkpoint.snapshot.tensors.get(name)
    if isinstance(problem, ArchitectureError):
        if info is None:
            return "missing-bias" if name.endswith(".bias") else "missing-weight"
        if not any(module.name in checkpoint.accounting.used for module in owners):
            return "unexpected-tensor"
        is_bias = any(module.claim.roles.get("bias") == info for module in owners)
        return "unexpected-bias" if is_bias else "wrong-shape"
    if name in repeated:
        return "repeated-tensor"
    if info is None:
        return "missing-pre-scale"
    if name in kv and info.dtype not in FLOAT_DTYPES:
        return "kv-scale-dtype"
    return "mixed-16-bit" if info.dtype in ("BF16", "F16") else "refused"


def _is_lost(name: str, lost: set[str]) -> bool:
    """Whether the tensor, or the stacked one that would hold it, lies in a file that could not be read."""
    module = name.rpartition(".")[0]
    owner = module.partition(".experts.")[0] + ".experts" if ".experts." in module else None
    # A bare parameter (A_log) has its module's name as its own.
    return module in lost or owner in lost or name in lost


# --- what a load lets pass ---------------------------------------------------------------------------------


def _conflicts(checkpoint: Checkpoint) -> Iterator[Finding]:
    for conflict in checkpoint.conflicts:
        more = f" ({conflict.modules} modules)" if conflict.modules > 1 else ""
        yield finding(
            "declared-differs",
            conflict.where,
            seen=f"{conflict.says}{more}; against: {conflict.instead}",
            expected=f"one statement; followed: {conflict.chosen}",
        )


def _stale(checkpoint: Checkpoint, lost: Iterable[str]) -> Iterator[Finding]:
    for claimant in checkpoint.claimants:
        for matcher in claimant.declaration.matchers if claimant.declaration else ():
            for name in lost:
                matcher.find(name.rpartition(".")[0])
    # Asking for the warnings has every entry compared with every module.
    if not stale_entries(checkpoint.claimants, checkpoint.modules, checkpoint.plan):
        return
    shared = HEADS if checkpoint.plan is None or "lm_head" not in checkpoint.plan.weights else ()
    names = _with_parents(checkpoint.modules)
    looked_up = 0
    for claimant in checkpoint.claimants:
        for matcher in claimant.declaration.matchers if claimant.declaration else ():
            for entry in matcher.unused():
                if entry.text in shared:
                    continue
                looked_up += 1
                bare = entry.text.removeprefix("re:").replace("\\", "").strip("^$.*")
                near = nearest(bare, names) if looked_up <= _NEAREST else None
                yield finding(
                    "stale-entry",
                    entry.text,
                    seen=f"{entry.where}: {entry.text!r} matches none of {counted(len(checkpoint.modules), 'module')}",
                    expected=f"the nearest name is '{near}'" if near else "",
                )


def _with_parents(names: Mapping[str, object]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        while name:
            found[name] = None
            name = name.rpartition(".")[0]
    return list(found)


def _activation_scales(checkpoint: Checkpoint, lost: Container[str]) -> Iterator[Finding]:
    for name, module in checkpoint.modules.items():
        if name in checkpoint.accounting.waived_modules or not is_quantized(module.scheme):
            continue
        if module.declared not in ("fp4", "fp8-static") or any(r in module.claim.roles for r in INPUT_ROLES):
            continue
        places = [t.suffix for t in module.claim.form.tensors if t.role in INPUT_ROLES]
        if any(f"{name}.{place}" in lost for place in places):
            continue
        otherwise = "with 16-bit activations" if module.declared == "fp4" else "with scales per token"
        yield finding(
            "missing-activation-scale",
            f"{name}.{places[0]}" if places else name,
            seen=f"no such tensor; {module.algorithm} declares {module.declared} activations",
            fix=f"calibrate the module (an expert that saw no token has none); until then it runs {otherwise}",
        )


def _kv(checkpoint: Checkpoint, grouped: Grouped, lost: Iterable[str]) -> Iterator[Finding]:
    gone = {owner[0] for name in lost if (owner := kv_owner(name)) is not None}
    for module, scales in grouped.kv_scales.items():
        if module in gone:
            continue
        if "kv" not in scales and ("k" in scales) != ("v" in scales):
            present, absent = ("k", "v") if "k" in scales else ("v", "k")
            name = scales[present].name
            yield finding("lone-kv-scale", name, seen=f"no {absent}_scale for {module}")
    declared = checkpoint.kv_cache
    if declared is None:
        return
    attention = [
        expected.module.rpartition(".")[0]
        for own, expected in (checkpoint.plan.weights if checkpoint.plan else {}).items()
        if own.endswith(".self_attn.k_proj")
    ]
    bare = [module for module in attention if module not in grouped.kv_scales and module not in gone]
    where = f"{declared.algorithm} is declared by {declared.where}"
    if bare and len(bare) == len(attention):
        yield finding(
            "missing-kv-scale", bare[0], seen=f"{where}; of {counted(len(bare), 'layer')} none has scales"
        )
        return
    for module in bare:
        yield finding(
            "missing-kv-scale", module, seen=f"{where}; other layers have scales, this one has none"
        )
