"""ModelOpt's configuration: quantized_layers before quant_algo before config_groups, from two files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from vtensors.configs import ConfigFiles, QuantizationBlock
from vtensors.errors import DeclarationError
from vtensors.matching import Matcher, fused_spellings, glob_entry
from vtensors.patterns import MatchBudget
from vtensors.records import Declaration, DeclaredScheme, KvCacheDeclared
from vtensors_plugins.conventions.modelopt_conflicts import against_groups, between_files
from vtensors_plugins.conventions.modelopt_forms import ALGORITHMS, UNSUPPORTED, block_of
from vtensors_plugins.conventions.modelopt_sources import quantizes_no_weight, read_sources

PLUGIN_HINT = "install or write a plugin for it (docs/writing-a-plugin.md)"


def declare(configs: ConfigFiles) -> Declaration | None:
    """ModelOpt's declaration, or None when neither file is ModelOpt's.

    Errors: an algorithm that is unknown or not supported, naming the value, the layer and what is accepted.
    """
    found = read_sources(configs)
    if not found:
        return None
    main = found[0]
    algorithm = next((source.algorithm for source in found if source.algorithm), None)
    layers = next((source.layers for source in found if source.layers is not None), None)
    nothing = algorithm is None and layers is None
    if nothing and not quantizes_no_weight(found, configs):
        return None
    mixed = not nothing and (algorithm is None or algorithm.lower() == "mixed_precision")
    if mixed and layers is None:
        raise DeclarationError(
            "MIXED_PRECISION is declared without quantized_layers",
            file=main.block.where,
            seen=f"keys {', '.join(sorted(main.block.values))}",
            accepted="quantized_layers: {module: {quant_algo: ...}}",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    shared = any(source.block.quant_method == "fp8" for source in found)
    excludes = next((source for source in found if source.excludes), main)
    budget = MatchBudget()
    matcher = Matcher(
        entries=tuple(glob_entry(text, excludes.block.where, budget) for text in excludes.excludes)
    )
    resolver = _Resolver(
        where=main.block.where,
        layers=dict(layers) if mixed and layers else {},
        default=None if mixed else algorithm,
        group_size=next(filter(None, (source.block.values.get("group_size") for source in found)), None),
        block=_block(main.block),
        excludes=matcher,
        leave_rest=shared,
        unlisted="quant_algo is null" if nothing else "not in quantized_layers",
    )
    kv = next((source for source in found if source.kv), None)
    return Declaration(
        convention="modelopt",
        scheme_of=resolver.scheme_of,
        summary=f"{main.producer} {algorithm or ('quant_algo null' if nothing else 'quantized_layers')}",
        kv_cache=KvCacheDeclared(algorithm=kv.kv, where=kv.block.where) if kv and kv.kv else None,
        conflicts=(*between_files(found), *against_groups(main, layers, algorithm)),
        matchers=(matcher,),
    )


def _block(block: QuantizationBlock) -> tuple[int, int] | None:
    size = block.values.get("weight_block_size")
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    return None


@attrs.define
class _Resolver:
    where: str
    layers: dict[str, Mapping[str, Any]]
    default: str | None
    group_size: Any
    block: tuple[int, int] | None
    excludes: Matcher
    leave_rest: bool
    unlisted: str
    _made: dict[tuple[Any, ...], DeclaredScheme] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        for module, entry in self.layers.items():
            self._family(entry.get("quant_algo"), f"quantized_layers['{module}']")
        if self.default is not None:
            self._family(self.default, "quant_algo")

    def scheme_of(self, module: str) -> DeclaredScheme | None:
        """The declared scheme; unlisted in MIXED_PRECISION means unquantized."""
        if self.layers:
            for spelling in fused_spellings(module):
                entry = self.layers.get(spelling)
                if entry is not None:
                    where = "quantized_layers"
                    return self._scheme(entry.get("quant_algo"), entry.get("group_size"), where, True)
        excluded = self.excludes.find(module)
        if excluded is not None:
            return self._unquantized(f"{excluded.where}: excluded by '{excluded.text}'", True)
        if self.default is not None:
            return self._scheme(self.default, self.group_size, "quant_algo", False)
        return None if self.leave_rest else self._unquantized(f"{self.where}: {self.unlisted}", False)

    def _unquantized(self, where: str, explicit: bool) -> DeclaredScheme:
        key = ("unquantized", where)
        if key not in self._made:
            self._made[key] = DeclaredScheme(
                weight="unquantized",
                algorithm="unquantized",
                activations="16bit",
                where=where,
                explicit=explicit,
            )
        return self._made[key]

    def _scheme(self, algorithm: Any, group: Any, key: str, explicit: bool) -> DeclaredScheme:
        if algorithm is None:
            return self._unquantized(f"{self.where}: {key} has quant_algo null", explicit)
        size = group if type(group) is int and group > 0 else None
        # One record per algorithm, not one per module: tens of thousands of modules share it.
        known = (str(algorithm), size, explicit)
        if known not in self._made:
            weight, activations = self._family(algorithm, key)
            self._made[known] = DeclaredScheme(
                weight=weight,
                algorithm=str(algorithm),
                activations=activations,
                where=f"{self.where}: {key}",
                explicit=explicit,
                block=self.block or block_of(algorithm, group),
                group_size=size,
            )
        return self._made[known]

    def _family(self, algorithm: Any, key: str) -> tuple[str, str]:
        """(weight family, activations) of an algorithm. Raises DeclarationError naming the layer and the value."""
        if algorithm is None:
            return "unquantized", "16bit"
        family = ALGORITHMS.get(str(algorithm).lower())
        if family is None:
            recognized = str(algorithm).lower() in UNSUPPORTED
            raise DeclarationError(
                f"{key}: quant_algo is {'recognized but not supported' if recognized else 'unknown'}",
                file=self.where,
                seen=repr(algorithm),
                accepted=", ".join([*(name.upper() for name in ALGORITHMS), "MIXED_PRECISION", "null"]),
                fix=PLUGIN_HINT,
            )
        return family
