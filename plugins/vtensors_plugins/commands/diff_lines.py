"""The lines that `diff` prints: one per group of modules that changed alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vtensors.comparison import Comparison
from vtensors.comparison_groups import ChangeGroup, grouped
from vtensors.config_comparison import ConfigChange
from vtensors.counts import agreeing, counted
from vtensors.module_facts import pattern_of
from vtensors.provenance import Provenance
from vtensors_plugins.commands.schemes_table import size

if TYPE_CHECKING:
    from vtensors_plugins.comparison_values import ModuleValues, ValueComparison

_NAMED_AT_MOST = 5
# Of one object of a configuration file; beyond it only the keys that say what the quantization is.
_KEYS_AT_MOST = 6
_ALWAYS_SHOWN = (
    "quant_method",
    "quant_algo",
    "format",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "producer",
    "version",
    "quantized_layers",
    "ignore",
    "exclude_modules",
    "modules_to_not_convert",
)
_ULP_AT_MOST = 1 << 20


def report_lines(comparison: Comparison) -> Iterator[str]:
    """The header comparison: both sides, changed modules, KV scales, statements, configuration keys, a total."""
    yield f"A  {_side(comparison.before)}"
    yield f"B  {_side(comparison.after)}"
    yield from _group_lines([*grouped(comparison.modules), *grouped(comparison.kv_scales)])
    for statement in comparison.statements:
        before, after = _value(statement.before), _value(statement.after)
        yield f"{statement.what.replace('_', ' ')}  {before} -> {after}"
    yield from _config_lines(comparison.config)
    yield _total(comparison)


def value_lines(values: ValueComparison) -> Iterator[str]:
    """The comparison of the weights: the verdict, modules by verdict, and each group that is not the same."""
    verdict = f"values   {values.verdict}"
    if values.verdict == "same weights, other convention":
        verdict += ": codes and block scales bit for bit"
        if values.reciprocal_ulp is not None:
            verdict += f", scalars within {values.reciprocal_ulp} ULP of the other side's reciprocal"
    yield verdict
    counts = ", ".join(f"{count:,} {verdict}" for verdict, count in values.counts.items())
    yield f"         {counts}; {size(values.compared_bytes)} compared"
    groups: dict[tuple[str, str, str], list[ModuleValues]] = {}
    for module in values.modules:
        if module.verdict not in ("same bits", "same weights, other convention"):
            groups.setdefault((module.verdict, pattern_of(module.before), module.reason), []).append(module)
    for (word, pattern, reason), members in groups.items():
        worst = max(members, key=lambda module: module.dequantized.max_abs if module.dequantized else 0.0)
        yield f"  {word}  {_times(pattern, len(members))}  {reason or _distance(worst)}"


def _side(provenance: Provenance) -> str:
    commit = f" @ {provenance.commit}" if provenance.commit else ""
    hashes = ", ".join(shard.header_sha256[:12] for shard in provenance.shards[:3])
    more = " ..." if len(provenance.shards) > 3 else ""
    return f"{provenance.repo or provenance.source}{commit}  (headers {hashes}{more})"


def _group_lines(groups: Sequence[ChangeGroup]) -> Iterator[str]:
    """One line per group; what is said of several in a row stands once, below the last of them."""
    details = [_details(group) for group in groups]
    for place, group in enumerate(groups):
        yield f"{group.kind:<8} {_times(group.pattern, len(group.modules))}  {group.headline}"
        following = details[place + 1] if place + 1 < len(groups) else ""
        if details[place] and details[place] != following:
            yield f"           {details[place]}"


def _details(group: ChangeGroup) -> str:
    before, after = size(group.bytes_before), size(group.bytes_after)
    sizes = [f"{before} -> {after}"] if group.kind == "changed" and before != after else []
    return "; ".join([*group.details, *sizes])


def _times(pattern: str, count: int) -> str:
    return f"{pattern} x {count:,}" if count > 1 else pattern


def _config_lines(changes: Sequence[ConfigChange]) -> Iterator[str]:
    """Each key that differs; of many below one key of a file only those that matter most."""
    below: dict[tuple[str, str], list[ConfigChange]] = {}
    for change in changes:
        below.setdefault((change.file, change.key.partition(".")[0]), []).append(change)
    for (file, top), found in below.items():
        shown = found
        if len(found) > _KEYS_AT_MOST:
            shown = [change for change in found if change.key.rpartition(".")[2] in _ALWAYS_SHOWN]
        for change in shown:
            yield f"config   {_config(change)}"
        hidden = len(found) - len(shown)
        if hidden:
            told = f"config   {file}: {top}: {counted(hidden, 'more key' if shown else 'key')} "
            yield f"{told}{agreeing(hidden, 'differs', 'differ')} (see --json)"


def _config(change: ConfigChange) -> str:
    if not change.key:
        return f"{change.file}: {'new file' if change.missing == 'before' else 'file is gone'}"
    parts = [
        f"{sign}{len(names):,} ({', '.join(names[:_NAMED_AT_MOST])}{', ...' if len(names) > _NAMED_AT_MOST else ''})"
        for sign, names in (("+", change.added), ("-", change.removed), ("changed ", change.altered))
        if names
    ]
    if parts:
        return f"{change.file}: {change.key} entries {', '.join(parts)}"
    before = "absent" if change.missing == "before" else _value(change.before)
    after = "absent" if change.missing == "after" else _value(change.after)
    return f"{change.file}: {change.key} {before} -> {after}"


def _total(comparison: Comparison) -> str:
    modules = comparison.modules
    if comparison.identical:
        return f"Identical by headers and configuration: {counted(len(modules.pairs), 'module')}."
    counts = [
        f"{len(found):,} {word}"
        for word, found in (
            ("changed", modules.changed),
            ("added", modules.added),
            ("removed", modules.removed),
        )
        if found
    ]
    same = len(modules.pairs) - len(modules.changed)
    return f"Modules: {', '.join([*counts, f'{same:,} the same'])}."


def _distance(module: ModuleValues) -> str:
    parts = [
        f"{role}: {distance.different:,} of {distance.elements:,} differ"
        + (f" (max {_ulp(distance.max_ulp)})" if distance.max_ulp else "")
        for role, distance in module.distances.items()
        if not distance.same
    ]
    values = module.dequantized
    if values is not None and values.different:
        noise = "" if values.snr_db is None else f", SNR {values.snr_db:.1f} dB"
        parts.append(f"dequantized: max {_ulp(values.max_ulp)}, max difference {values.max_abs:.3g}{noise}")
    return "; ".join(parts)


def _ulp(distance: int) -> str:
    # Values of opposite sign or far apart: their number of ULP says nothing more.
    return f"{distance:,} ULP" if distance <= _ULP_AT_MOST else "over a million ULP"


def _value(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
