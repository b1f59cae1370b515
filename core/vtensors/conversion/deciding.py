"""The fate of one module under a target: kept, respelled, dequantized, quantized or requantized; or refused."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.conversion.layout import PlannedTensor
from vtensors.conversion.parts import StoredPart, stored_part, stored_parts, whole_tensor
from vtensors.conversion.units import Assignment, Fate, Remake, Unit
from vtensors.errors import PluginError, RequestError
from vtensors.forms import UNUSED_ROLE
from vtensors.modules import Module, is_quantized
from vtensors.records import Convention, ConventionWriter, Encoder, Layout, OutputTensor, WeightToWrite
from vtensors.tensors import expected_nbytes

PLAIN_DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
# Roles of symmetric schemes that say nothing: zero points (checked to be zero) and a repeated shape.
EMPTY_ROLES = ("weight_zero_point", "input_zero_point", "weight_shape")
_ACTIVATION_ROLES = ("input_scale", "input_divisor")


@attrs.frozen(kw_only=True)
class Target:
    """Where a checkpoint goes. convention: its record, `write` set. drop_unused: leave activation scales out
    where 16-bit activations are declared."""

    convention: Convention
    writer: ConventionWriter
    drop_unused: bool = False


def decide(checkpoint: Checkpoint, module: Module, target: Target, assigned: Assignment | None) -> Unit:
    """The unit of one module. Raises RequestError naming module and field for what the target cannot hold."""
    if assigned is None or (assigned.scheme == module.scheme and not is_quantized(module.scheme)):
        if not is_quantized(module.scheme) or module.convention == target.convention.name:
            return _kept(module, target)
        return _respelled(module, target)
    if assigned.scheme == module.scheme:
        return (
            _kept(module, target)
            if module.convention == target.convention.name
            else _respelled(module, target)
        )
    return _remade(checkpoint, module, target, assigned)


def load_encoder(checkpoint: Checkpoint, scheme: str) -> Encoder:
    """The encoder of a scheme. Raises RequestError for a scheme that is unknown or has none, PluginError."""
    owned = checkpoint.plugins.registry.schemes.get(scheme)
    able = [name for name, one in checkpoint.plugins.registry.schemes.items() if one.record.encoder]
    if owned is None or owned.record.encoder is None:
        raise RequestError(
            "nothing encodes this scheme",
            seen=scheme,
            accepted=", ".join(sorted([*able, *PLAIN_DTYPES])),
            fix="choose one of these, or install the plugin that encodes it",
        )
    module_name, _, attribute = owned.record.encoder.partition(":")
    try:
        encoder: Encoder = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as cause:
        raise PluginError(
            f"the encoder of scheme '{scheme}' ({owned.distribution}) cannot be imported",
            seen=f"{owned.record.encoder}: {cause}",
            fix="repair or upgrade that distribution",
        ) from cause
    return encoder


def _words(scheme: str, convention: str) -> str:
    return scheme if convention == "plain" else f"{scheme} ({convention})"


def keep_expert(module: Module, target: Target) -> Unit:
    """An expert that stays as it is while others of its stacked tensor do not: cut out under its own name."""
    parts = stored_parts(module.claim)
    unit = _kept(module, target)
    suffixes = {place.role: place.suffix for place in module.claim.form.tensors}
    return attrs.evolve(
        unit,
        name=module.name,
        parts={role: parts[role] for role in unit.parts},
        tensors=tuple(
            PlannedTensor(
                name=f"{module.name}.{suffixes[role]}",
                dtype=parts[role].layout.dtype,
                shape=parts[role].layout.shape,
                role=role,
            )
            for role in unit.parts
        ),
    )


def _kept(module: Module, target: Target) -> Unit:
    """The module's tensors as stored, whole; a stacked tensor with all of its experts."""
    tensors = []
    kept = {}
    quantized = is_quantized(module.scheme)
    left_out = []
    unused = quantized and target.drop_unused and module.declared == "16bit"
    for role, info in module.claim.roles.items():
        if role == UNUSED_ROLE:
            left_out.append(f"{info.name}: not used")
            continue
        if unused and role in _ACTIVATION_ROLES:
            left_out.append(f"{info.name}: activation scale, and 16-bit activations are declared")
            continue
        tensors.append(PlannedTensor(name=info.name, dtype=info.dtype, shape=info.shape, role=role))
        kept[role] = whole_tensor(info)
    words = _words(module.scheme, module.convention)
    return Unit(
        name=module.name,
        fate=Fate.KEPT,
        before=words,
        after=words,
        tensors=tuple(tensors),
        parts=kept,
        left_out=tuple(left_out),
        weight=_to_write(module, kept, same=True) if quantized else None,
        linear=_is_linear(module) and module.claim.part is None,
    )


def _is_linear(module: Module) -> bool:
    codes = module.claim.roles["codes"].name
    return len(module.shape) >= 2 and codes.endswith(".weight")


def _to_write(module: Module, parts: Mapping[str, StoredPart], *, same: bool) -> WeightToWrite:
    declared = module.declared_scheme
    return WeightToWrite(
        module=module.name,
        scheme=module.scheme,
        shape=module.shape,
        roles={role: part.layout for role, part in parts.items()},
        activations=module.declared,
        algorithm=declared.algorithm if declared is not None and same else "",
        block=declared.block if declared is not None else None,
        group_size=declared.group_size if declared is not None else None,
    )


def _respelled(module: Module, target: Target) -> Unit:
    parts = stored_parts(module.claim)
    left_out = []
    for role in list(parts):
        name = parts[role].info.name
        if role in EMPTY_ROLES:
            left_out.append(f"{name}: says nothing in a symmetric scheme")
            del parts[role]
        elif role in _ACTIVATION_ROLES and target.drop_unused and module.declared == "16bit":
            left_out.append(f"{name}: activation scale, and 16-bit activations are declared")
            del parts[role]
    weight = _to_write(module, parts, same=False)
    return Unit(
        name=module.name,
        fate=Fate.RESPELLED,
        before=_words(module.scheme, module.convention),
        after=_words(module.scheme, target.convention.name),
        tensors=_spelled(target, weight),
        parts=parts,
        left_out=tuple(left_out),
        weight=weight,
        linear=True,
    )


def _spelled(target: Target, weight: WeightToWrite) -> tuple[PlannedTensor, ...]:
    name = target.convention.name
    if weight.scheme not in target.writer.schemes:
        raise RequestError(
            f"{name} cannot hold this scheme",
            tensor=weight.module,
            seen=weight.scheme,
            accepted=", ".join(target.writer.schemes) or "unquantized weights",
            fix=f"name a scheme for it (--to {name}:SCHEME --allow-requantize), or --to plain:bf16",
        )
    outputs = target.writer.spell(weight)
    lost = sorted(set(weight.roles) - {output.role for output in outputs})
    if lost:
        raise PluginError(
            f"the writer of '{name}' leaves out parts of the weight: {', '.join(lost)}",
            tensor=weight.module,
            seen="none of its outputs holds them",
            accepted="a tensor for every part",
            fix="a writer spells every role or raises RequestError",
        )
    return tuple(_planned(name, weight, output) for output in outputs)


def _planned(convention: str, weight: WeightToWrite, output: OutputTensor) -> PlannedTensor:
    layout = weight.roles[output.role]
    if output.change is None:
        stored = expected_nbytes(layout.dtype, layout.shape)
        if layout.dtype != output.dtype or stored != expected_nbytes(output.dtype, output.shape):
            raise PluginError(
                f"the writer of '{convention}' stores '{output.role}' unchanged as something else",
                tensor=f"{weight.module}.{output.suffix}",
                seen=f"{layout.dtype} {list(layout.shape)} as {output.dtype} {list(output.shape)}",
                accepted="the dtype and shape that the source has",
                fix="repair or upgrade that plugin",
            )
    return PlannedTensor(
        name=f"{weight.module}.{output.suffix}",
        dtype=output.dtype,
        shape=output.shape,
        role=output.role,
        change=output.change,
    )


def _remade(checkpoint: Checkpoint, module: Module, target: Target, assigned: Assignment) -> Unit:
    roles = module.claim.roles
    plain = assigned.scheme in PLAIN_DTYPES
    left_out = [
        f"{roles[role].name}: belongs to {module.scheme}"
        for role in (*_ACTIVATION_ROLES, *EMPTY_ROLES, UNUSED_ROLE)
        if role in roles
    ]
    if "pre_scale" in roles:
        left_out.append(f"{roles['pre_scale'].name}: multiplied into the weight")
    remake = Remake(
        claim=module.claim,
        convention=checkpoint.plugins.registry.conventions[module.convention].record,
        encoder=None if plain else load_encoder(checkpoint, assigned.scheme),
        dtype=PLAIN_DTYPES.get(assigned.scheme, ""),
        options=assigned.options,
        partners=assigned.partners,
        fold="pre_scale" in roles,
    )
    weight = None
    bias = {"bias": stored_part(module.claim, "bias")} if "bias" in roles else {}
    if remake.encoder is None:
        tensors = [
            PlannedTensor(name=f"{module.name}.weight", dtype=remake.dtype, shape=module.shape, role="codes")
        ]
        if bias:
            layout = bias["bias"].layout
            tensors.append(
                PlannedTensor(name=f"{module.name}.bias", dtype=layout.dtype, shape=layout.shape, role="bias")
            )
        spelled = tuple(tensors)
    else:
        weight = _anew(module, remake.encoder, target, assigned, bias)
        spelled = _spelled(target, weight)
    was_quantized = is_quantized(module.scheme)
    return Unit(
        name=module.name,
        fate=Fate.DEQUANTIZED if plain else Fate.REQUANTIZED if was_quantized else Fate.QUANTIZED,
        before=_words(module.scheme, module.convention),
        after=_words(assigned.scheme, "plain" if plain else target.convention.name),
        tensors=spelled,
        parts=bias,
        remake=remake,
        left_out=tuple(left_out),
        weight=weight,
        linear=True,
    )


def _anew(
    module: Module, encoder: Encoder, target: Target, assigned: Assignment, bias: Mapping[str, StoredPart]
) -> WeightToWrite:
    try:
        layouts = encoder.layouts(module.shape, assigned.options)
    except RequestError as problem:
        raise RequestError(
            problem.problem,
            tensor=module.name,
            seen=problem.seen,
            accepted=problem.accepted,
            fix="leave the module as it is: --skip, or an ignore entry in the recipe",
        ) from problem
    roles: dict[str, Layout] = {**layouts, **{role: part.layout for role, part in bias.items()}}
    return WeightToWrite(
        module=module.name,
        scheme=assigned.scheme,
        shape=module.shape,
        roles=roles,
        activations=target.writer.activations.get(assigned.scheme, "16bit"),
        block=encoder.block,
        group_size=encoder.block[1] if encoder.block else None,
    )
