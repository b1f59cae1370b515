"""ModelOpt's configuration: quantized_layers before quant_algo before config_groups, from two files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from vtensors.configs import CONFIG, HF_QUANT, ConfigFiles, QuantizationBlock, string_list
from vtensors.errors import DeclarationError
from vtensors.matching import Matcher, fused_spellings, glob_entry
from vtensors.patterns import MatchBudget
from vtensors.records import Conflict, Declaration, DeclaredScheme, KvCacheDeclared
from vtensors_plugins.conventions.modelopt_forms import ALGORITHMS, UNSUPPORTED, block_of

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_fp8")
PLUGIN_HINT = "install or write a plugin for it (docs/writing-a-plugin.md)"


@attrs.frozen(kw_only=True)
class _Source:
    """What one file says. block: the object; excludes and kv under the names that file uses."""

    block: QuantizationBlock
    algorithm: str | None
    layers: Mapping[str, Mapping[str, Any]] | None
    excludes: tuple[str, ...]
    kv: str | None
    producer: str


def declare(configs: ConfigFiles) -> Declaration | None:
    """ModelOpt's declaration, or None when neither file is ModelOpt's.

    Errors: an algorithm that is unknown or not supported, naming the value, the layer and what is accepted.
    """
    blocks = [block for block in configs.blocks() if _is_modelopt(block)]
    legacy = configs.hf_quantization()
    found = [_parse(block) for block in [*blocks, *([legacy] if legacy else [])]]
    if not found:
        return None
    main = found[0]
    algorithm = next((source.algorithm for source in found if source.algorithm), None)
    layers = next((source.layers for source in found if source.layers is not None), None)
    if algorithm is None and layers is None:
        return None
    mixed = algorithm is None or algorithm.lower() == "mixed_precision"
    if mixed and layers is None:
        raise DeclarationError(
            "MIXED_PRECISION is declared without quantized_layers",
            file=main.block.where,
            seen=f"keys {', '.join(sorted(main.block.values))}",
            accepted="quantized_layers: {module: {quant_algo: ...}}",
        )
    shared = any(block.quant_method == "fp8" for block in blocks)
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
    )
    kv = next((source for source in found if source.kv), None)
    return Declaration(
        convention="modelopt",
        scheme_of=resolver.scheme_of,
        summary=f"{main.producer} {algorithm or 'quantized_layers'}".strip(),
        kv_cache=KvCacheDeclared(algorithm=kv.kv, where=kv.block.where) if kv and kv.kv else None,
        conflicts=(*_between_files(found), *_against_groups(main, layers, algorithm)),
        matchers=(matcher,),
    )


def _is_modelopt(block: QuantizationBlock) -> bool:
    method, producer = block.quant_method, block.values.get("producer")
    if method in METHODS:
        return True
    by_producer = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    has_algorithm = isinstance(block.values.get("quant_algo"), str) or "quantized_layers" in block.values
    return has_algorithm and (method in (None, "fp8") or by_producer)


def _parse(block: QuantizationBlock) -> _Source:
    values = block.values
    algorithm = values.get("quant_algo")
    if algorithm is not None and not isinstance(algorithm, str):
        raise DeclarationError("quant_algo is not a string", file=block.where, seen=repr(algorithm))
    layers = values.get("quantized_layers")
    if layers is not None and not (
        isinstance(layers, Mapping) and all(isinstance(entry, Mapping) for entry in layers.values())
    ):
        raise DeclarationError(
            "quantized_layers is not an object of objects",
            file=block.where,
            seen=repr(layers)[:80],
            accepted="{module: {quant_algo: ...}}",
        )
    excludes = string_list(values, "ignore", block.where) or string_list(
        values, "exclude_modules", block.where
    )
    producer = values.get("producer")
    version = f"modelopt {producer.get('version', '')}" if isinstance(producer, Mapping) else "modelopt"
    return _Source(
        block=block,
        algorithm=algorithm,
        layers=layers,
        excludes=tuple(excludes),
        kv=_kv(values),
        producer=version.strip(),
    )


def _kv(values: Mapping[str, Any]) -> str | None:
    scheme = values.get("kv_cache_scheme") or values.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        kind = {"float": "FP", "int": "INT"}.get(str(scheme.get("type")), str(scheme.get("type")))
        return f"{kind}{scheme.get('num_bits')}"
    return str(scheme) if scheme else None


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
    _made: dict[tuple[Any, ...], DeclaredScheme] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        for module, entry in self.layers.items():
            self._family(entry.get("quant_algo"), f"quantized_layers['{module}']")
        if self.default is not None:
            self._family(self.default, "quant_algo")

    def scheme_of(self, module: str) -> DeclaredScheme | None:
        """The declared scheme; unlisted in MIXED_PRECISION means unquantised."""
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
        return None if self.leave_rest else self._unquantized(f"{self.where}: not in quantized_layers", False)

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
            recognised = str(algorithm).lower() in UNSUPPORTED
            raise DeclarationError(
                f"{key}: quant_algo is {'recognised but not supported' if recognised else 'unknown'}",
                file=self.where,
                seen=repr(algorithm),
                accepted=", ".join([*(name.upper() for name in ALGORITHMS), "MIXED_PRECISION", "null"]),
                fix=PLUGIN_HINT,
            )
        return family


# --- contradictions ---------------------------------------------------------------------------------------


def _between_files(found: list[_Source]) -> Iterator[Conflict]:
    if len(found) < 2:
        return
    main = found[0]
    for other in found[1:]:
        places = f"{main.block.where} and {other.block.where}"
        if main.producer != other.producer and "modelopt" not in (main.producer, other.producer):
            yield _conflict(places, "producer", other.producer, main.producer, "neither decides anything")
        if main.algorithm and other.algorithm and main.algorithm.lower() != other.algorithm.lower():
            yield _conflict(places, "quant_algo", other.algorithm, main.algorithm, main.algorithm)
        if (main.kv or "none").upper() != (other.kv or "none").upper():
            yield _conflict(
                places,
                "KV cache",
                main.kv or "nothing",
                other.kv or "nothing",
                main.kv or other.kv or "nothing",
            )
        if main.layers is not None and other.layers is not None and dict(main.layers) != dict(other.layers):
            names = [n for n in {*main.layers, *other.layers} if main.layers.get(n) != other.layers.get(n)]
            example = min(names)
            yield _conflict(
                places,
                f"quantized_layers of {len(names)} modules, for example '{example}'",
                f"{other.layers.get(example)}",
                f"{main.layers.get(example)}",
                f"{main.block.where} is followed",
                modules=len(names),
            )
        if set(main.excludes) != set(other.excludes):
            difference = sorted(set(main.excludes) ^ set(other.excludes))
            yield _conflict(
                places,
                f"excluded modules ({len(difference)} differ, for example '{difference[0]}')",
                f"{len(other.excludes)} entries in {HF_QUANT}",
                f"{len(main.excludes)} entries in {CONFIG}",
                f"{main.block.where} is followed",
            )


def _conflict(places: str, what: str, says: str, instead: str, chosen: str, *, modules: int = 1) -> Conflict:
    return Conflict(where=f"{places}: {what}", says=says, instead=instead, chosen=chosen, modules=modules)


def _against_groups(
    main: _Source, layers: Mapping[str, Mapping[str, Any]] | None, algorithm: str | None
) -> Iterator[Conflict]:
    """config_groups that give activations which the algorithm of their targets does not have, or the reverse.

    NVFP4_AWQ is left out: its writer always describes it as 8-bit activations in groups of 128.
    """
    groups = main.block.values.get("config_groups")
    if not isinstance(groups, Mapping):
        return
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            continue
        targets = group.get("targets") if isinstance(group.get("targets"), list) else []
        says = _group_activations(group.get("input_activations"))
        named = [(layers or {}).get(str(target)) for target in targets or []]
        algorithms = {str(entry.get("quant_algo")) for entry in named if entry and entry.get("quant_algo")}
        if not algorithms and algorithm and algorithm.lower() in ALGORITHMS:
            algorithms = {algorithm}
        for declared in sorted(algorithms):
            instead = ALGORITHMS.get(declared.lower(), ("", says))[1]
            if declared.lower() == "nvfp4_awq" or says == instead.split("-")[0]:
                continue
            yield Conflict(
                where=f"{main.block.where}: config_groups.{name}",
                says=f"input activations {says}",
                instead=f"{'quantized_layers' if named else 'quant_algo'} {declared}: {instead}",
                chosen=f"{declared}: {instead} (quantized_layers and quant_algo go before config_groups)",
                modules=sum(1 for e in named if e and str(e.get("quant_algo")) == declared) or 1,
            )


def _group_activations(values: Any) -> str:
    if not isinstance(values, Mapping):
        return "16bit"
    bits = values.get("num_bits")
    return {"4": "fp4", "8": "fp8"}.get(str(bits), f"{bits}-bit")
