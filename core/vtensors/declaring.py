"""Every convention's reading of the configuration files, and the entries in them that match nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from vtensors.answer_checks import CheckedSchemeOf, check_declaration
from vtensors.claim_reasons import Claimant
from vtensors.configs import HF_QUANT, ConfigFiles
from vtensors.containment import PLUGIN_FAILURES
from vtensors.counts import agreeing, counted
from vtensors.errors import DeclarationError, VtensorsError
from vtensors.manager import Plugins
from vtensors.matching import HEADS, nearest
from vtensors.records import DeclaredScheme, ModelPlan

# What lies beside the text model in a wrapper: a component of the module's name.
_OTHER_TOWERS = frozenset(
    ("visual", "vision_tower", "vision_model", "audio_tower", "audio_model", "multi_modal_projector")
)

# The nearest name is looked up for so many lists: each takes up to a second where modules are many.
_LOOKUPS = 10


def read_declarations(
    configs: ConfigFiles, plugins: Plugins, source: str
) -> tuple[tuple[Claimant, ...], tuple[str, ...]]:
    """Every convention with its declaration, and a warning per convention that failed.

    Errors: DeclarationError of a convention that recognizes the configuration and refuses it, and for a
    quantization block that no convention answers to.
    """
    claimants: list[Claimant] = []
    warnings: list[str] = []
    for owned in plugins.registry.conventions.values():
        convention = owned.record
        try:
            declaration = convention.declare(configs)
            if declaration is not None:
                declaration = check_declaration(declaration)
        except VtensorsError:
            raise
        except PLUGIN_FAILURES as problem:  # a broken plugin must not stop the others
            warnings.append(
                f"convention '{convention.name}' of plugin '{owned.plugin}' ({owned.distribution}) failed and was "
                f"left out: {type(problem).__name__}: {problem}"
            )
            continue
        if declaration is not None:
            owner = f"convention '{convention.name}' of plugin '{owned.plugin}' ({owned.distribution})"
            checked = CheckedSchemeOf(declaration.scheme_of, owner)
            declaration = attrs.evolve(declaration, scheme_of=checked)
        if declaration is not None and configs.only_text_is_declared():
            declaration = attrs.evolve(declaration, scheme_of=_TextOnly(declaration.scheme_of))
        claimants.append(
            Claimant(
                convention=convention,
                plugin=owned.plugin,
                owner=owned.distribution,
                declaration=declaration,
            )
        )
    _refuse_unknown_blocks(configs, claimants, source)
    return tuple(claimants), tuple(warnings)


@attrs.frozen
class _TextOnly:
    """A `scheme_of` that is silent about modules beside the text model."""

    scheme_of: Callable[[str], DeclaredScheme | None]

    def __call__(self, module: str) -> DeclaredScheme | None:
        beside = not _OTHER_TOWERS.isdisjoint(module.split("."))
        return None if beside else self.scheme_of(module)


def _refuse_unknown_blocks(configs: ConfigFiles, claimants: Sequence[Claimant], source: str) -> None:
    declared = [c for c in claimants if c.declaration is not None and c.declaration.summary]
    methods = {method for c in claimants for method in c.convention.quant_methods}
    anything = any(not c.convention.quant_methods for c in declared)
    for block in configs.blocks():
        method = block.quant_method
        if declared and (method in (None, "") or method in methods or anything):
            continue
        raise DeclarationError(
            "no convention understands this quantization_config",
            file=block.where,
            seen=f"quant_method {block.values.get('quant_method')!r}, keys {', '.join(sorted(block.values))}"
            f"; {HF_QUANT} {'present' if configs.hf_quant is not None else 'absent'}",
            accepted=f"quant_method {', '.join(sorted(methods))}; registered conventions: "
            + ", ".join(c.convention.name for c in claimants),
            fix=f"install a plugin that reads it, or write one: docs/writing-a-plugin.md ({source})",
        )


def stale_entries(
    claimants: Sequence[Claimant], modules: Iterable[str], plan: ModelPlan | None
) -> tuple[str, ...]:
    """One warning per list whose entries match no module of the checkpoint, with the nearest name.

    An entry for a head that the model shares with its embeddings is not stale.
    """
    names = list(modules)
    shared = HEADS if plan is None or "lm_head" not in plan.weights else ()
    found: list[str] = []
    for claimant in claimants:
        for matcher in claimant.declaration.matchers if claimant.declaration else ():
            for name in names:
                matcher.find(name)
            stale = [entry for entry in matcher.unused() if entry.text not in shared]
            if not stale:
                continue
            bare = stale[0].text.removeprefix("re:").replace("\\", "").strip("^$.*")
            near = nearest(bare, _with_parents(names)) if len(found) < _LOOKUPS else None
            found.append(
                f"{stale[0].where}: {counted(len(stale), 'entry', 'entries')} "
                f"{agreeing(len(stale), 'matches', 'match')} no module: "
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
