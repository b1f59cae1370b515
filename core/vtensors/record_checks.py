"""Checks of what a plugin returns: the right records, and fields of them that later code can rely on."""

from __future__ import annotations

import math
import re

from vtensors.errors import SwitchError
from vtensors.forms import Form, TensorForm, is_pattern
from vtensors.kernel_targets import problem_with_target
from vtensors.records import (
    API_VERSION,
    Architecture,
    Command,
    Convention,
    KernelSpec,
    PluginInfo,
    Scheme,
    Switch,
)
from vtensors.switches import KINDS, PREFIX, parse_value

AnyRecord = Scheme | Convention | KernelSpec | Architecture | Switch | Command

# Hook -> the type of the records in its list.
RECORD_TYPES: dict[str, type[AnyRecord]] = {
    "vtensors_schemes": Scheme,
    "vtensors_conventions": Convention,
    "vtensors_kernels": KernelSpec,
    "vtensors_architectures": Architecture,
    "vtensors_switches": Switch,
    "vtensors_commands": Command,
}

# What has a meaning of its own in `VT_KERNELS`.
_RESERVED = frozenset(",:!*?[]")
_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


def check_info(info: object) -> PluginInfo:
    """The PluginInfo itself. Raises ValueError with what is wrong with it."""
    if not isinstance(info, PluginInfo):
        raise ValueError(f"vtensors_plugin() returned {_describe(info)}, not a vtensors.PluginInfo")
    if info.api_version != API_VERSION:
        raise ValueError(
            f"it was written for plugin api version {info.api_version!r}; this vtensors has {API_VERSION}"
        )
    if not _is_name(info.name):
        raise ValueError(f"vtensors_plugin() gives no name: {info.name!r}")
    return info


def check_records(hook: str, result: object) -> list[AnyRecord]:
    """The records of one hook as a list. Raises ValueError with the first thing wrong with them."""
    wanted = RECORD_TYPES[hook]
    if not isinstance(result, (list, tuple)):
        raise ValueError(f"{hook}() returned {_describe(result)}, not a list of vtensors.{wanted.__name__}")
    seen: set[str] = set()
    records: list[AnyRecord] = []
    for position, record in enumerate(result):
        if not isinstance(record, wanted):
            raise ValueError(
                f"{hook}() returned {_describe(record)} at place {position}, not a vtensors.{wanted.__name__}"
            )
        problem = check_record(record)
        if problem:
            raise ValueError(f"{hook}(): {wanted.__name__} {record.name!r} {problem}")
        if record.name in seen:
            raise ValueError(f"{hook}() returned two records named {record.name!r}")
        seen.add(record.name)
        records.append(record)
    return records


def check_record(record: AnyRecord) -> str | None:
    """What is wrong with a record's fields, as the end of a sentence, or None."""
    if not _is_name(record.name):
        return "has no name"
    if record.name != record.name.strip():
        return "has blanks around its name"
    if not record.name.isprintable():
        return "has a name that does not fit on a line"
    if isinstance(record, (Scheme, KernelSpec)) and not _RESERVED.isdisjoint(record.name):
        return f"has a name that VT_KERNELS cannot spell: it holds one of {' '.join(sorted(_RESERVED))}"
    match record:
        case Scheme():
            return _check_path("weight_class", record.weight_class)
        case Convention():
            return _check_convention(record)
        case KernelSpec():
            return _check_kernel(record)
        case Architecture():
            return _check_callables({"matches": record.matches, "plan": record.plan}) or _check_path(
                "build", record.build
            )
        case Switch():
            return _check_switch(record)
        case Command():
            return _check_path("load", record.load)


def check_form(form: object) -> str | None:
    """What is wrong with a form, as the end of a sentence, or None."""
    if not isinstance(form, Form):
        return f"has {_describe(form)} among its forms"
    if not form.tensors:
        return f"has a form of '{form.scheme}' without tensors"
    tensors: tuple[object, ...] = form.tensors
    for tensor in tensors:
        if not isinstance(tensor, TensorForm):
            return f"has {_describe(tensor)} among the tensors of a form"
        if tensor.sense not in ("", "multiplies", "divides"):
            return f"says that '{tensor.suffix}' {tensor.sense!r}; accepted: 'multiplies', 'divides' or ''"
        if not tensor.role:
            return f"gives no role to '{tensor.suffix}'"
        for pattern in tensor.shapes:
            if not is_pattern(pattern):
                return f"has a shape pattern of '{tensor.suffix}' that cannot be read: {pattern!r}"
    # Two spellings of one optional tensor may share a role; whoever stores both is found when it is claimed.
    required = {tensor.role for tensor in form.tensors if tensor.required}
    roles = [tensor.role for tensor in form.tensors if tensor.role in required]
    suffixes = [tensor.suffix for tensor in form.tensors]
    for what, words in (("role", roles), ("suffix", suffixes)):
        repeated = sorted({word for word in words if words.count(word) > 1})
        if repeated:
            return f"has a form of '{form.scheme}' with the {what} '{repeated[0]}' twice"
    return None


def _check_convention(record: Convention) -> str | None:
    problem = _check_callables({"declare": record.declare, "read": record.read})
    if problem:
        return problem
    claim: object = record.claim
    if claim is not None and not callable(claim):
        return f"has {_describe(claim)} as claim, not a function or None"
    problem = _check_words({"overrides": record.overrides, "quant_methods": record.quant_methods})
    if problem:
        return problem
    forms: object = record.forms
    if not isinstance(forms, tuple):
        return f"has {_describe(forms)} as forms, not a tuple of vtensors.Form"
    return next((problem for problem in map(check_form, forms) if problem), None)


def _check_kernel(record: KernelSpec) -> str | None:
    problem = _check_callables({"refuse": record.refuse, "bind": record.bind}) or _check_words(
        {"schemes": record.schemes, "targets": record.targets}
    )
    if problem:
        return problem
    if not _is_name(record.op):
        return f"has {_describe(record.op)} as op, not a name from the op list"
    if not isinstance(record.sums, str):
        return f"has {_describe(record.sums)} as order of sums, not a name"
    if not _is_name(record.numerics):
        return f"has {_describe(record.numerics)} as numerics, not words"
    if not record.schemes or not record.targets:
        return f"names no {'target' if record.schemes else 'scheme'}"
    return (
        next((problem for problem in map(problem_with_target, record.targets) if problem), None)
        or _check_rows(record.tokens)
        or _check_cost(record.cost)
        or _check_layout(record)
        or _check_probe(record)
    )


def _check_rows(rows: object) -> str | None:
    if isinstance(rows, tuple):
        match rows:
            case (int(first), None) if type(first) is int and first >= 1:
                return None
            case (int(first), int(last)) if type(first) is type(last) is int and 1 <= first <= last:
                return None
    return f"has {_describe(rows)} as tokens, not (fewest, most rows M or None) with 1 <= fewest <= most"


def _check_cost(cost: object) -> str | None:
    number = isinstance(cost, (int, float)) and not isinstance(cost, bool) and 0 <= cost < math.inf
    if number or callable(cost):
        return None
    return f"has {_describe(cost)} as cost, not microseconds from 0 on or a function that gives them"


def _check_layout(record: KernelSpec) -> str | None:
    if not _is_name(record.layout):
        return f"has {_describe(record.layout)} as layout, not a name"
    if record.layout != "stored":
        if record.prepare is None:
            return f"reads the layout '{record.layout}' and has no prepare that makes it"
        return _check_callables({"prepare": record.prepare})
    return None if record.prepare is None else "has a prepare although it reads the layout 'stored'"


def _check_probe(record: KernelSpec) -> str | None:
    if record.probe is None and record.fingerprint is None:
        return None
    if record.probe is None or record.fingerprint is None:
        given = "fingerprint" if record.probe is None else "probe"
        return f"has a {given} only; probe and fingerprint come together"
    return _check_callables({"probe": record.probe, "fingerprint": record.fingerprint})


def _check_switch(record: Switch) -> str | None:
    if not record.name.startswith(PREFIX):
        return f"does not start with {PREFIX}"
    if record.kind not in KINDS:
        return f"has the kind {record.kind!r}; accepted: {', '.join(KINDS)}"
    try:
        parse_value(record, record.default)
    except SwitchError as error:
        return f"has a default that it does not accept itself: {error.seen}"
    return None


def _check_callables(fields: dict[str, object]) -> str | None:
    for name, value in fields.items():
        if not callable(value):
            return f"has {_describe(value)} as {name}, not a function"
    return None


def _check_words(fields: dict[str, object]) -> str | None:
    for name, value in fields.items():
        if not isinstance(value, tuple) or not all(isinstance(word, str) for word in value):
            return f"has {_describe(value)} as {name}, not a tuple of text"
    return None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _check_path(field: str, value: object) -> str | None:
    if isinstance(value, str) and _DOTTED.match(value):
        return None
    return f"has {_describe(value)} as {field}, not 'package.module:name'"


def _describe(value: object) -> str:
    """A value in a message: short, and safe for objects whose repr misbehaves."""
    try:
        text = repr(value)
    except Exception:
        text = "an object whose repr() fails"
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
