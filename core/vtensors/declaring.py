"""Every convention's reading of the configuration files, and the entries in them that match nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vtensors.claim_reasons import Claimant
from vtensors.configs import HF_QUANT, ConfigFiles
from vtensors.errors import DeclarationError
from vtensors.manager import Plugins
from vtensors.matching import HEADS, nearest
from vtensors.records import ModelPlan


def read_declarations(configs: ConfigFiles, plugins: Plugins, source: str) -> tuple[Claimant, ...]:
    """Every convention with its declaration; a quantisation block that nobody understands is refused."""
    claimants = tuple(
        Claimant(convention=owned.record, owner=owned.distribution, declaration=owned.record.declare(configs))
        for owned in plugins.registry.conventions.values()
    )
    declared = [c for c in claimants if c.declaration is not None and c.declaration.summary]
    blocks = configs.blocks()
    if blocks and not declared:
        methods = sorted(m for c in claimants for m in c.convention.quant_methods)
        block = blocks[0]
        raise DeclarationError(
            "no convention understands this quantization_config",
            file=block.where,
            seen=f"quant_method {block.values.get('quant_method')!r}, keys {', '.join(sorted(block.values))}"
            f"; {HF_QUANT} {'present' if configs.hf_quant is not None else 'absent'}",
            accepted=f"quant_method {', '.join(methods)}; registered conventions: "
            + ", ".join(c.convention.name for c in claimants),
            fix=f"install a plugin that reads it, or write one: docs/writing-a-plugin.md ({source})",
        )
    return claimants


def stale_entries(
    claimants: Sequence[Claimant], modules: Iterable[str], plan: ModelPlan | None
) -> tuple[str, ...]:
    """One warning per list whose entries match no module of the checkpoint, with the nearest name.

    An entry for a head that the model shares with its embeddings is not stale.
    """
    names = list(modules)
    shared = HEADS if plan is not None and "lm_head" not in plan.weights else ()
    found = []
    for claimant in claimants:
        for matcher in claimant.declaration.matchers if claimant.declaration else ():
            for name in names:
                matcher.find(name)
            stale = [entry for entry in matcher.unused() if entry.text not in shared]
            if not stale:
                continue
            bare = stale[0].text.removeprefix("re:").replace("\\", "").strip("^$.*")
            near = nearest(bare, _with_parents(names))
            found.append(
                f"{stale[0].where}: {len(stale)} entries match no module: "
                + ", ".join(repr(entry.text) for entry in stale[:3])
                + (" ..." if len(stale) > 3 else "")
                + (f"; the nearest name is '{near}'" if near else "")
            )
    return tuple(found)


def _with_parents(names: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        found[name] = None
        while (end := name.rfind(".")) > 0:
            name = name[:end]
            found[name] = None
    return list(found)
