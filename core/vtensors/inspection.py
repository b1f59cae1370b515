"""What `inspect` says of a checkpoint, as plain dictionaries: schemes, waivers, conflicts, problems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vtensors.activations import ActivationRequest
from vtensors.checkpoint import Checkpoint
from vtensors.counts import counted
from vtensors.modules import Module, is_quantized

PARTS = (
    "embeddings",
    "attention",
    "linear_attention",
    "mlp",
    "router",
    "experts",
    "shared_expert",
    "lm_head",
    "norm",
    "other",
)


def inspection(checkpoint: Checkpoint, activations: str | None = None) -> dict[str, Any]:
    """The complete report. activations: as for `load_model`; decides `executed`. No weight byte is read."""
    request = checkpoint.activation_request(activations)
    accounting = checkpoint.accounting
    tensors = checkpoint.snapshot.tensors
    kv = checkpoint.kv_cache
    return {
        "provenance": checkpoint.provenance.to_json(),
        "architecture": checkpoint.architecture_name,
        "plugin": checkpoint.architecture.name if checkpoint.architecture else None,
        "declared": [
            c.declaration.summary for c in checkpoint.claimants if c.declaration and c.declaration.summary
        ],
        "schemes": scheme_rows(checkpoint, request),
        "waived": [
            {"reason": reason, "tensors": len(names), "bytes": sum(tensors[n].nbytes for n in names)}
            for reason, names in accounting.waived.items()
        ],
        "unclaimed": list(accounting.unclaimed),
        "conflicts": [
            {"where": c.where, "says": c.says, "instead": c.instead, "chosen": c.chosen, "modules": c.modules}
            for c in checkpoint.conflicts
        ],
        "kv_cache": {"declared": kv.algorithm if kv else None, "executed": "16bit"},
        "warnings": [*checkpoint.warnings, *activation_warnings(checkpoint, request)],
        "problems": [str(problem) for problem in accounting.problems],
        "tensors": len(tensors),
        "total_bytes": sum(info.nbytes for info in tensors.values()),
    }


def has_findings(report: dict[str, Any]) -> bool:
    """Whether a load would refuse the checkpoint as reported."""
    return bool(report["unclaimed"] or report["problems"])


def scheme_rows(checkpoint: Checkpoint, request: ActivationRequest) -> list[dict[str, Any]]:
    """One row per scheme, convention and precision: modules, bytes, parts of the model, algorithms.

    Modules that are waived (vision, mtp) are not counted. Quantized rows first, largest first.
    """
    rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for name, module in checkpoint.modules.items():
        if name in checkpoint.accounting.waived_modules:
            continue
        executed = checkpoint.executed(name, request).activations
        key = (module.scheme, module.convention, module.declared, executed)
        row = rows.get(key)
        if row is None:
            row = rows[key] = {
                "scheme": module.scheme,
                "convention": module.convention,
                "declared": module.declared,
                "executed": executed,
                "modules": 0,
                "bytes": 0,
                "parts": {},
                "algorithms": [],
            }
        row["modules"] += 1
        row["bytes"] += module.nbytes
        part = part_of(checkpoint, name)
        row["parts"][part] = row["parts"].get(part, 0) + 1
        if module.algorithm and is_quantized(module.scheme) and module.algorithm not in row["algorithms"]:
            row["algorithms"].append(module.algorithm)
    for row in rows.values():
        row["parts"] = {part: row["parts"][part] for part in PARTS if part in row["parts"]}
    return sorted(rows.values(), key=lambda row: (not is_quantized(row["scheme"]), -row["bytes"]))


def part_of(checkpoint: Checkpoint, name: str) -> str:
    """The part of the model that a module belongs to; `other` where no architecture says."""
    used = checkpoint.accounting.used.get(name)
    return used[1].part if used is not None and used[1].part in PARTS else "other"


def activation_warnings(checkpoint: Checkpoint, request: ActivationRequest) -> list[str]:
    """Each surprise about activation precision once, with the number of modules and the first name."""
    found: dict[str, list[str]] = {}
    for name in checkpoint.modules:
        if name in checkpoint.accounting.waived_modules:
            continue
        warning = checkpoint.executed(name, request).warning
        if warning:
            found.setdefault(warning, []).append(name)
    return [
        f"{warning} ({counted(len(names), 'module')}, first: {names[0]})" for warning, names in found.items()
    ]


def module_report(checkpoint: Checkpoint, module: Module, request: ActivationRequest) -> dict[str, Any]:
    """One module: its tensors, the form they fit, what is declared and what would run."""
    declared = module.declared_scheme
    executed = checkpoint.executed(module.name, request)
    form = module.claim.form
    return {
        "module": module.name,
        "scheme": module.scheme,
        "convention": module.convention,
        "shape": list(module.shape),
        "bytes": module.nbytes,
        "part": part_of(checkpoint, module.name),
        "waived": checkpoint.accounting.waived_modules.get(module.name),
        "declared": module.declared,
        "algorithm": module.algorithm or None,
        "declared_by": declared.where if declared else None,
        "executed": executed.activations,
        "warning": executed.warning or None,
        "evidence": f"fits {form.scheme} of {module.convention}: weight = {form.formula}",
        "source": form.source,
        "tensors": [
            {
                "name": info.name,
                "role": role,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "bytes": info.nbytes,
                "file": info.file,
            }
            for role, info in module.claim.roles.items()
        ],
    }


def unclaimed_reports(checkpoint: Checkpoint, names: Iterable[str]) -> list[dict[str, Any]]:
    """Groups that nobody reads: the tensors seen and each convention's reason."""
    return [
        {
            "module": name,
            "tensors": {suffix: info.describe() for suffix, info in unclaimed.group.tensors.items()},
            "reasons": dict(unclaimed.reasons),
        }
        for name in names
        if (unclaimed := checkpoint.claims.unclaimed.get(name)) is not None
    ]
