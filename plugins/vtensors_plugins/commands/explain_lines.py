"""What `explain` prints for a person: a block per row, and one line of totals. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vtensors.counts import counted
from vtensors.kernel_candidates import cost_in_words, rows_in_words
from vtensors.records import KernelSpec
from vtensors_plugins.commands.explain_reasons import together, told_reasons
from vtensors_plugins.commands.explain_rows import ExplainRow, SegmentRow, Totals
from vtensors_plugins.commands.kernel_facts import UNTESTED, applies_to, takes_activations_of
from vtensors_plugins.commands.schemes_table import TIED, hanging, size

_INDENT = "    "
_HEAD = 11
# Blanks between a number and its unit, and within `M = 1..32` and `512 x 128`.
_TO_TIE = re.compile(
    r"(?<=\d) (?=(?:us|[kMGT]?B|x)\b)|(?<=\d x) (?=\d)|(?<=\bM) (?=>?= ?\d)|(?<=\bM =) |(?<=\bM >=) "
)


def row_lines(
    row: ExplainRow,
    kernels: Mapping[str, KernelSpec],
    width: int,
    times: Mapping[int, float | str] | None = None,
) -> list[str]:
    """The block of a row: what it is, the op, a line per kernel, sizes, and why the others lost.

    kernels: by name; those of another scheme or for other activations alone are left out.
    times: rows M -> microseconds, or why there are none.
    """
    request = row.request
    shape = "" if request.shape is None else f" {request.shape[0]} x {request.shape[1]}"
    if request.experts:
        shape += f" and {request.shape[1]} x {request.shape[0] // 2}" if request.shape is not None else ""
        shape += f" of {request.experts} experts, {request.chosen} a token"
    said = f"{' + '.join(row.algorithms)} of {row.convention}" if row.algorithms else row.convention
    count = f"  x{len(row.modules)}" if len(row.modules) > 1 else ""
    declared = " and ".join(row.declared)
    lines = [f"{row.name}{count}"]
    lines.append(_line("scheme", f"{request.scheme}{shape}, {said}", width))
    lines.append(_line("activation", f"declared {declared}, executed {request.activations}", width))
    whole = row.asked == request.op
    lines.append(_line("op", request.op if whole else f"{request.op}, a step of {row.asked}", width))
    if not whole:
        seen = together((what, reason) for what, reason in row.not_fused if _speaks(what, row, kernels))
        nobody = [(row.asked, f"no kernel computes it on {request.scheme} weights")]
        lines += [_line("", f"{what}: {reason}", width) for what, reason in seen or nobody]
    lines += [_line("assumes", text, width) for text in row.assumes]
    lines += [_line(segment.rows, _kernel_words(segment), width) for segment in row.segments]
    if row.merged is not None:
        rows = rows_in_words(row.merged.tokens)
        words = f"{rows} with {row.merged.around}: {row.merged.kernel}"
        lines.append(_line("merged", words, width))
    prepared = "unknown: the layout does not tell" if row.prepared is None else size(row.prepared)
    lines.append(_line("bytes", f"{size(row.stored)} stored, {prepared} prepared", width))
    if times:
        told = (f"M = {m}: {f'{t:.1f} us' if isinstance(t, float) else t}" for m, t in times.items())
        lines.append(_line("measured", ", ".join(told), width))
    serving = {segment.kernel for segment in row.segments}
    told_lost = told_reasons([(segment.tokens, segment.lost) for segment in row.segments], kernels)
    losers = [pair for pair in row.not_fused if whole and pair in row.failures]
    losers += [pair for pair in told_lost if pair[0] not in serving and _speaks(pair[0], row, kernels)]
    for index, (names, reason) in enumerate(together(losers)):
        lines.append(_line("" if index else "not", f"{names}: {reason}", width))
    return lines


def total_line(totals: Totals, in_vain: int = 0) -> str:
    """Fallbacks, what runs on the reference, and bytes, in one line. in_vain: rules that no kernel can follow."""
    count = totals.fallbacks
    words = counted(count, "fallback") if count else "no fallback"
    if in_vain:
        rules = f"{counted(in_vain, 'rule')} in vain"
        words = f"{words}, {rules}" if count else rules
    more = "" if totals.complete else " and more that is not told"
    return (
        f"{words}; {totals.on_reference:,} of {counted(totals.weights, 'weight')} on the reference; "
        f"{size(totals.stored)} stored, {size(totals.prepared)}{more} prepared"
    )


def _line(head: str, text: str, width: int) -> str:
    return hanging(f"{_INDENT}{head.ljust(_HEAD)} ", _TO_TIE.sub(TIED, text), width)


def _kernel_words(segment: SegmentRow) -> str:
    cost = ""
    if segment.cost is not None:
        card = f" for {segment.modelled_for}" if segment.modelled_for else ""
        cost = f", {cost_in_words(segment.cost)} {'measured' if segment.measured else f'modelled{card}'}"
    state = f" ({segment.state})" if segment.state == "compiled, not run" else ""
    untested = f" ({UNTESTED})" if segment.untested else ""
    return f"{segment.kernel}{state}{untested}, layout {segment.layout}{cost}"


def _speaks(name: str, row: ExplainRow, kernels: Mapping[str, KernelSpec]) -> bool:
    """Whether a reason is worth showing: of an op, of a failure, or of the row's scheme and activations."""
    kernel = kernels.get(name)
    if kernel is None or any(name == failed for failed, _ in row.failures):
        return True
    return applies_to(kernel, row.request.scheme) and takes_activations_of(kernel, row.request)
