"""compressed-tensors' configuration: config_groups with targets, an ignore list, per-group formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtensors.configs import ConfigFiles, QuantizationBlock, string_list
from vtensors.errors import DeclarationError
from vtensors.matching import Matcher, is_class_name, regex_entry
from vtensors.patterns import MatchBudget
from vtensors.records import Declaration, DeclaredScheme, KvCacheDeclared
from vtensors_plugins.conventions.compressed_tensors_targets import Group, Resolver

SUPPORTED_FORMATS = (
    "nvfp4-pack-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "dense",
)
OTHER_FORMATS = (
    "int-quantized",
    "pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "sparse-bitmask",
    "sparse-24-bitmask",
    "marlin-24",
)
# Every module is looked up in every group; writers make one group per scheme, fewer than ten.
MAX_GROUPS = 256
PLUGIN_HINT = "install or write a plugin for it (docs/writing-a-plugin.md)"


def declare(configs: ConfigFiles) -> Declaration | None:
    """compressed-tensors' declaration, or None when config.json does not hold one.

    Errors: missing or empty config_groups, formats and arguments that are unknown or not supported.
    """
    block = next((b for b in configs.blocks() if b.quant_method == "compressed-tensors" or _by_key(b)), None)
    if block is None:
        return None
    values, where = _unwrapped(block)
    _refuse_extras(values, where)
    groups = values.get("config_groups")
    if groups in (None, {}) and values.get("format") == "dense":
        groups = {}  # only the KV cache is quantized
    elif not isinstance(groups, Mapping) or not groups:
        raise DeclarationError(
            "no config_groups: what is quantized cannot be known",
            file=where,
            seen=f"format {values.get('format')!r}, config_groups {groups!r}",
            accepted="config_groups: {group_0: {targets: [...], weights: {...}}}",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    if len(groups) > MAX_GROUPS:
        raise DeclarationError(
            "too many config_groups",
            file=where,
            seen=f"{len(groups)}",
            accepted=f"at most {MAX_GROUPS}",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    budget = MatchBudget()
    parsed = tuple(_group(name, group, values, where, budget) for name, group in groups.items())
    ignored = string_list(values, "ignore", where)
    ignore = Matcher(
        entries=tuple(regex_entry(text, f"{where}.ignore", budget) for text in ignored), parents=False
    )
    kv = values.get("kv_cache_scheme")
    return Declaration(
        convention="compressed-tensors",
        scheme_of=Resolver(groups=parsed, ignore=ignore, where=where).scheme_of,
        summary=f"compressed-tensors {values.get('version', '')} {values.get('format', '')}".strip(),
        kv_cache=KvCacheDeclared(algorithm=_kv(kv), where=where) if kv else None,
        matchers=(ignore, *(group.targets for group in parsed)),
        warnings=tuple(_warnings(groups, where)),
    )


def _by_key(block: QuantizationBlock) -> bool:
    values, _ = _unwrapped(block)
    return block.quant_method in (None, "") and "config_groups" in values and "format" in values


def _unwrapped(block: QuantizationBlock) -> tuple[Mapping[str, Any], str]:
    """The block's keys and place; a `quantization_config` inside of it stands for its keys, as transformers 5.24
    utils/quantization_config.py reads it.
    """
    nested = block.values.get("quantization_config")
    if not isinstance(nested, Mapping):
        return block.values, block.where
    outer = {key: value for key, value in block.values.items() if key != "quantization_config"}
    return {**outer, **nested}, f"{block.where}.quantization_config"


def _refuse_extras(values: Mapping[str, Any], where: str) -> None:
    for key in ("transform_config", "sparsity_config"):
        extra = values.get(key)
        if (
            not extra
            or extra == {"config_groups": {}}
            or (isinstance(extra, Mapping) and extra.get("format") in (None, "dense") and key[0] == "s")
        ):
            continue
        raise DeclarationError(
            f"{key} is not supported: the weights alone would give wrong results",
            file=where,
            seen=str(extra)[:80],
            accepted="none",
            fix=PLUGIN_HINT,
        )


def _group(name: str, group: Any, values: Mapping[str, Any], top: str, budget: MatchBudget) -> Group:
    where = f"{top}.config_groups.{name}"
    if not isinstance(group, Mapping):
        raise DeclarationError(
            "the group is not an object",
            file=where,
            seen=repr(group)[:80],
            accepted="an object with targets and weights",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    weights = group.get("weights")
    style = group.get("format") or values.get("format")
    if style == "mixed-precision":
        style = None
    if not isinstance(weights, Mapping):
        # A group for activations alone, such as an attention's: the format of the whole file is not its own.
        if weights is not None or group.get("format") not in (None, "dense"):
            raise DeclarationError(
                "weights is missing",
                file=where,
                seen=repr(weights)[:80],
                accepted="an object with num_bits and type",
                fix="correct the configuration file, or use the one that belongs to the weights",
            )
        style = "dense"
    algorithm = style or _infer(weights or {}, group.get("input_activations"), where)
    targets = sorted(string_list(group, "targets", where))
    names = tuple(
        regex_entry(text, f"{where}.targets", budget) for text in targets if not is_class_name(text)
    )
    classes = tuple(text for text in targets if is_class_name(text))
    return Group(
        name=name,
        scheme=_scheme(str(algorithm), weights or {}, group.get("input_activations"), where),
        targets=Matcher(entries=names, parents=False),
        classes=classes,
    )


def _infer(weights: Mapping[str, Any], activations: Any, where: str) -> str:
    """The format that writers give such arguments, for groups that do not name one."""
    bits, kind = weights.get("num_bits"), weights.get("type")
    if kind == "float" and bits == 4:
        return "nvfp4-pack-quantized" if weights.get("group_size", 16) == 16 else "mxfp4-pack-quantized"
    if kind == "float" and bits == 8:
        if weights.get("group_size") == 32:
            return "mxfp8-quantized"
        return "float-quantized" if activations else "naive-quantized"
    if kind == "int":
        return "int-quantized" if activations else "pack-quantized"
    raise DeclarationError(
        "cannot tell the format of the group",
        file=where,
        seen=f"num_bits {bits!r}, type {kind!r}",
        accepted=", ".join(SUPPORTED_FORMATS),
        fix="correct the configuration file, or use the one that belongs to the weights",
    )


def _scheme(algorithm: str, weights: Mapping[str, Any], activations: Any, where: str) -> DeclaredScheme:
    if algorithm not in SUPPORTED_FORMATS:
        recognized = "recognized but not supported" if algorithm in OTHER_FORMATS else "unknown"
        raise DeclarationError(
            f"the format is {recognized}",
            file=where,
            seen=repr(algorithm),
            accepted=", ".join(SUPPORTED_FORMATS),
            fix=PLUGIN_HINT,
        )
    if algorithm == "dense":
        return DeclaredScheme(weight="unquantized", algorithm="unquantized", activations="16bit", where=where)
    _check_arguments(algorithm, weights, where)
    strategy = _strategy(weights)
    structure = weights.get("block_structure")
    family = {"nvfp4-pack-quantized": "nvfp4", "mxfp8-quantized": "mxfp8"}.get(algorithm, "fp8")
    return DeclaredScheme(
        weight=family,
        algorithm=f"{algorithm}:{strategy}" if family == "fp8" else algorithm,
        activations=_activations(activations, where),
        where=where,
        block=_block(structure, strategy, weights.get("group_size"), where),
        group_size=_group_size(activations),
    )


def _check_arguments(algorithm: str, weights: Mapping[str, Any], where: str) -> None:
    bits = 4 if algorithm == "nvfp4-pack-quantized" else 8
    if weights.get("num_bits") != bits or weights.get("type") != "float":
        raise DeclarationError(
            f"{algorithm} with other weights",
            file=f"{where}.weights",
            seen=f"num_bits {weights.get('num_bits')!r}, type {weights.get('type')!r}",
            accepted=f"num_bits {bits}, type 'float'",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    if weights.get("symmetric") is False:
        raise DeclarationError(
            "asymmetric float weights are not supported",
            file=f"{where}.weights",
            seen="symmetric false",
            accepted="symmetric true",
            fix="use a checkpoint with symmetric weights",
        )


def _block(structure: Any, strategy: str, group: Any, where: str) -> tuple[int, int] | None:
    """Rows and columns of one FP8 scale; a group is a block of one row."""
    if structure is not None:
        if (
            isinstance(structure, list)
            and len(structure) == 2
            and all(type(n) is int and n > 0 for n in structure)
        ):
            return structure[0], structure[1]
        raise DeclarationError(
            "block_structure is not two sizes",
            file=f"{where}.weights",
            seen=repr(structure)[:80],
            accepted="[rows, columns] or null",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    return (1, group) if strategy == "group" and type(group) is int and group > 0 else None


def _strategy(weights: Mapping[str, Any]) -> str:
    """`strategy`, or what its absence means: no group_size tensor, -1 channel, above 0 group."""
    strategy = weights.get("strategy")
    if strategy is not None:
        return str(strategy)
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _activations(values: Any, where: str) -> str:
    if values is None:
        return "16bit"
    if isinstance(values, Mapping) and values.get("type") == "float":
        if values.get("num_bits") == 4:
            return "fp4"
        if values.get("num_bits") == 8:
            return "fp8-dynamic" if values.get("dynamic") else "fp8-static"
    raise DeclarationError(
        "the input activations are not supported",
        file=f"{where}.input_activations",
        seen=str(values)[:120],
        accepted="null, or type 'float' with num_bits 4 or 8",
        fix=PLUGIN_HINT,
    )


def _group_size(activations: Any) -> int | None:
    size = activations.get("group_size") if isinstance(activations, Mapping) else None
    return size if type(size) is int and size > 0 else None


def _kv(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"{'FP' if values.get('type') == 'float' else 'INT'}{values.get('num_bits')}"
    return str(values)


def _warnings(groups: Mapping[str, Any], where: str) -> list[str]:
    found = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            continue
        if group.get("output_activations"):
            found.append(f"{where}.config_groups.{name}: output_activations are declared and not applied")
        inputs = group.get("input_activations")
        if (
            isinstance(inputs, Mapping)
            and inputs.get("dynamic") is True
            and inputs.get("strategy") == "tensor"
        ):
            # One scale for all tokens of a batch would make a row depend on its neighbours.
            found.append(
                f"{where}.config_groups.{name}: dynamic activations with one scale for all tokens are declared; "
                "each token gets its own"
            )
    return found
