"""What `explain` prints for a person: a block per row, and one line of totals. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vtensors.kernel_candidates import rows_in_words
from vtensors.records import KernelSpec
from vtensors_plugins.commands.explain_rows import ExplainRow, SegmentRow, Totals
from vtensors_plugins.commands.kernel_facts import applies_to
from vtensors_plugins.commands.schemes_table import hanging, size

_INDENT = "    "
_HEAD = 11


def row_lines(
    row: ExplainRow,
    kernels: Mapping[str, KernelSpec],
    width: int,
    times: Mapping[int, float | str] | None = None,
) -> list[str]:
    """The block of a row: what it is, the op, a line per kernel, sizes, and why the others lost.

    kernels: by name; those of another scheme are left out. times: rows M -> microseconds, or why there are none.
    """
    request = row.request
    shape = "" if request.shape is None else f" {request.shape[0]} x {request.shape[1]}"
    said = f"{' + '.join(row.algorithms)} of {row.convention}" if row.algorithms else row.convention
    count = f"  x{len(row.modules)}" if len(row.modules) > 1 else ""
    declared = " and ".join(row.declared)
    lines = [f"{row.name}{count}"]
    lines.append(_line("scheme", f"{request.scheme}{shape}, {said}", width))
    lines.append(_line("activation", f"declared {declared}, executed {request.activations}", width))
    whole = row.asked == request.op
    lines.append(_line("op", request.op if whole else f"{request.op}, a step of {row.asked}", width))
    if not whole:
        seen = [(what, reason) for what, reason in _merged(row.not_fused) if _speaks(what, row, kernels)]
        nobody = [(row.asked, f"no kernel computes it on {request.scheme} weights")]
        lines += [_line("", f"{what}: {reason}", width) for what, reason in seen or nobody]
    lines += [_line("assumes", text, width) for text in row.assumes]
    lines += [_line(segment.rows, _kernel_words(segment), width) for segment in row.segments]
    prepared = "unknown: the layout does not tell" if row.prepared is None else size(row.prepared)
    lines.append(_line("bytes", f"{size(row.stored)} stored, {prepared} prepared", width))
    if times:
        told = (f"M = {m}: {f'{t:.1f} us' if isinstance(t, float) else t}" for m, t in times.items())
        lines.append(_line("measured", ", ".join(told), width))
    head = "not"
    for name, reason in _losers(row.segments):
        if _speaks(name, row, kernels):
            lines.append(_line(head, f"{name}: {reason}", width))
            head = ""
    return lines


def total_line(totals: Totals) -> str:
    """Fallbacks, what runs on the reference, and bytes, in one line."""
    count = totals.fallbacks
    words = f"{count:,} fallback{'s' if count > 1 else ''}" if count else "no fallback"
    more = "" if totals.complete else " and more that is not told"
    return (
        f"{words}; {totals.on_reference:,} of {totals.weights:,} weights on the reference; "
        f"{size(totals.stored)} stored, {size(totals.prepared)}{more} prepared"
    )


def _line(head: str, text: str, width: int) -> str:
    return hanging(f"{_INDENT}{head.ljust(_HEAD)} ", text, width)


def _kernel_words(segment: SegmentRow) -> str:
    cost = ""
    if segment.cost is not None:
        cost = f", {segment.cost:.3g} us {'measured' if segment.measured else 'modelled'}"
    state = f" ({segment.state})" if segment.state == "compiled, not run" else ""
    return f"{segment.kernel}{state}, layout {segment.layout}{cost}"


def _speaks(name: str, row: ExplainRow, kernels: Mapping[str, KernelSpec]) -> bool:
    """Whether a reason is worth showing: of the row's scheme, or of an op."""
    kernel = kernels.get(name)
    return kernel is None or applies_to(kernel, row.request.scheme)


def _losers(segments: Sequence[SegmentRow]) -> list[tuple[str, str]]:
    """Each kernel that serves nowhere with its reasons; one that holds for every range is told once."""
    serving = {segment.kernel for segment in segments}
    found: dict[str, list[tuple[SegmentRow, str]]] = {}
    for segment in segments:
        for name, reason in segment.lost:
            if name not in serving:
                found.setdefault(name, []).append((segment, reason))
    told = []
    for name, reasons in found.items():
        words = list(dict.fromkeys(reason for _, reason in reasons))
        if len(words) == 1:
            told.append((name, words[0]))
        else:
            told.append((name, "; ".join(f"{rows_in_words(s.tokens)}: {reason}" for s, reason in reasons)))
    return told


def _merged(reasons: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(reasons))
