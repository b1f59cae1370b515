"""Who may compute a request for one range of rows, in order: filters with a reason each, then cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import attrs

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import VtensorsError
from vtensors.kernel_rules import NO_RULES, SWITCH, KernelRule, KernelRules
from vtensors.kernel_targets import device_name, reason_against, specificity
from vtensors.records import KernelRequest, KernelSpec

Rejected = tuple[tuple[str, str], ...]
Rows = tuple[int, int | None]
# (kernel, request) -> measured microseconds at request.tokens[0] rows, None = take the kernel's own model, text =
# why the kernel is out.
CostOf = Callable[[KernelSpec, KernelRequest], float | str | None]


@attrs.frozen(kw_only=True)
class Candidate:
    """A kernel that may serve. cost: microseconds at the fewest rows; measured: on this device, else modelled."""

    kernel: KernelSpec
    cost: float
    measured: bool = False


@attrs.frozen(kw_only=True)
class Pool:
    """What is chosen from. kernels: all registered ones. failed: kernel -> why it is out, whatever it says."""

    kernels: Sequence[KernelSpec]
    rules: KernelRules = NO_RULES
    cost_of: CostOf | None = None
    failed: Mapping[str, str] = attrs.field(factory=dict)


def candidates_for(
    request: KernelRequest, pool: Pool, related: Sequence[KernelSpec] = ()
) -> tuple[tuple[Candidate, ...], Rejected]:
    """The kernels of the op that serve every M of request.tokens, best first; the others, each with its reason.

    Order: cost, how closely the target fits the device, name. related: kernels of the op's decomposition, which
    a rule of the user may ask for. A kernel that raises when it is asked is rejected with the exception.
    """
    own = [kernel for kernel in pool.kernels if kernel.op == request.op]
    named = forced_kernels(request, pool, related or own)
    forced = [(rule, kernel) for rule, kernel in named if covers(kernel.tokens, request.tokens)]
    asked = ", ".join(dict.fromkeys(rule.text for rule, _ in forced))
    wanted = {kernel.name for _, kernel in forced}
    named_at_all = {kernel.name for _, kernel in named}
    found: list[tuple[float, int, str, Candidate]] = []
    rejected: list[tuple[str, str]] = []
    for kernel in own:
        reason = standing_reason(kernel, request, pool)
        if reason is None and wanted and kernel.name not in named_at_all:
            reason = f"{SWITCH} asks for {asked}"
        reason = reason or _reason_of_rows(kernel, request) or refusal_of(kernel, request)
        cost = reason or _cost(kernel, request, pool.cost_of)
        if isinstance(cost, str):
            rejected.append((kernel.name, cost))
        else:
            closeness = specificity(kernel.targets, request) or 0
            found.append((cost.cost, closeness, kernel.name, cost))
    found.sort(key=lambda entry: entry[:3])
    return tuple(entry[3] for entry in found), tuple(rejected)


def forced_kernels(
    request: KernelRequest, pool: Pool, kernels: Sequence[KernelSpec]
) -> list[tuple[KernelRule, KernelSpec]]:
    """Those of the kernels that the user asks for, each with its rule.

    Those that stand on this device where there are any: a glob also names kernels for other devices. One that
    failed stands: nothing else replaces it unasked.
    """
    named = pool.rules.forced(request.scheme, kernels)
    whole = attrs.evolve(pool, failed={})
    standing = [pair for pair in named if standing_reason(pair[1], request, whole) is None]
    return standing or named


def standing_reason(kernel: KernelSpec, request: KernelRequest, pool: Pool) -> str | None:
    """Why the kernel is out at any number of rows, or None."""
    if "*" not in kernel.schemes and request.scheme not in kernel.schemes:
        return f"computes {', '.join(kernel.schemes)}, not {request.scheme}"
    if specificity(kernel.targets, request) is None:
        return reason_against(kernel.targets, request)
    forbidding = pool.rules.forbidding(kernel, request.scheme)
    if forbidding is not None:
        return f"{SWITCH} forbids it ({forbidding.text})"
    return pool.failed.get(kernel.name)


def cost_at(kernel: KernelSpec, request: KernelRequest, cost_of: CostOf | None) -> float:
    """Microseconds at request.tokens[0] rows; infinite where the kernel cannot tell."""
    found = _cost(kernel, request, cost_of)
    return math.inf if isinstance(found, str) else found.cost


def covers(rows: Rows, asked: Rows) -> bool:
    """Whether rows contains every M of asked."""
    last = math.inf if rows[1] is None else rows[1]
    return rows[0] <= asked[0] and (math.inf if asked[1] is None else asked[1]) <= last


def rows_in_words(rows: Rows) -> str:
    """`M = 1..32`, `M >= 65`, `M = 1`."""
    first, last = rows
    if last is None:
        return f"M >= {first}"
    return f"M = {first}" if first == last else f"M = {first}..{last}"


def cost_in_words(cost: float) -> str:
    """Microseconds with three digits, whole ones from a thousand to a million: `2.52 us`, `1,694 us`, `1e+09 us`."""
    return f"{cost:,.0f} us" if 999.5 <= cost < 999999.5 else f"{cost:.3g} us"


def told(problem: BaseException) -> str:
    """An exception in one line."""
    text = in_one_line(str(problem))
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


def refusal_of(kernel: KernelSpec, request: KernelRequest) -> str | None:
    """Why the kernel itself refuses the request, in one line, or None; how it failed where it cannot say."""
    try:
        answer: object = kernel.refuse(request)
    except PLUGIN_FAILURES as problem:
        return f"failed to say whether it can: {told(problem)}"
    if answer is None:
        return None
    if isinstance(answer, str) and answer.strip():
        return in_one_line(answer)
    return f"failed to say whether it can: refuse() gives {answer!r:.40}, not a reason or None"


def in_one_line(text: str) -> str:
    """The lines of a text behind one another."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def no_kernel(request: KernelRequest, rejected: Rejected, pool: Pool) -> VtensorsError:
    """The error for a request that nothing serves: the candidates, each with its reason.

    First the rules of the user that are at fault and the kernels that they ask for; kernels of other schemes are
    counted.
    """
    scheme = request.scheme
    names = {name for name, _ in rejected}
    candidates = [kernel for kernel in pool.kernels if kernel.name in names]
    forced = pool.rules.forced(scheme, candidates)
    able = {k.name for k in candidates if "*" in k.schemes or scheme in k.schemes}
    wanted = {kernel.name for _, kernel in forced}
    listed = [f"{name}: {reason}" for name, reason in rejected if name in wanted]
    listed += [f"{name}: {reason}" for name, reason in rejected if name in able - wanted]
    others = len(names - able - wanted)
    if others:
        listed.append(f"{others} that compute{'s' if others == 1 else ''} other schemes, not {scheme}")
    rules = [rule for rule, _ in forced]
    rules += [rule for kernel in candidates if (rule := pool.rules.forbidding(kernel, scheme)) is not None]
    at_fault = any(SWITCH in reason for name, reason in rejected if name in able)
    told = ",".join(dict.fromkeys(rule.text for rule in rules)) if at_fault else ""
    where = "" if request.tokens == (1, None) else f", {rows_in_words(request.tokens)}"
    return VtensorsError(
        f"{f'under {SWITCH}={told} ' if told else ''}no kernel computes '{request.op}' on {scheme} weights "
        f"with {request.activations} activations on {device_name(request)}{where}",
        seen="candidates\n    " + "\n    ".join(listed)
        if rejected
        else f"no kernel is registered for '{request.op}'",
        fix=f"change {SWITCH}, or unset it"
        if told
        else "enable a plugin that brings one (`vtensors plugins` lists them)",
    )


def _reason_of_rows(kernel: KernelSpec, request: KernelRequest) -> str | None:
    if covers(kernel.tokens, request.tokens):
        return None
    return f"serves {rows_in_words(kernel.tokens)}, not {rows_in_words(request.tokens)}"


def _cost(kernel: KernelSpec, request: KernelRequest, cost_of: CostOf | None) -> Candidate | str:
    """The candidate with its cost, or why there is none."""
    measured = None if cost_of is None else cost_of(kernel, request)
    if isinstance(measured, str):
        return measured
    if measured is not None:
        return Candidate(kernel=kernel, cost=measured, measured=True)
    try:
        modelled: object = kernel.cost(request) if callable(kernel.cost) else kernel.cost
        value = math.nan if isinstance(modelled, (str, bool)) else float(modelled)  # type: ignore[arg-type]
    except PLUGIN_FAILURES as problem:
        return f"failed to tell its cost: {told(problem)}"
    if not 0 <= value < math.inf:
        return f"failed to tell its cost: {modelled!r:.40} is not microseconds from 0 on"
    return Candidate(kernel=kernel, cost=value)
