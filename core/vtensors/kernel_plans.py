"""What planning gives: a kernel for each range of rows, or the parts of a fused op; and how ops decompose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import attrs

from vtensors.kernel_candidates import Candidate, Pool, Rejected, Rows, cost_at, cost_in_words, covers
from vtensors.records import KernelRequest, KernelSpec

Decompose = Callable[[KernelRequest], Sequence[KernelRequest]]

# Ops on activations alone, with microseconds for the launch that each adds to a decomposition. They have no
# weight and no kernel to choose: a norm is a launch of the kernel `rms_norm`, the others run as the reference, a
# launch of torch's for every arithmetic step (a swiglu has six). H200, back-to-back in a CUDA graph: 1.0 us a node
# plus a ramp-up of 1 us.
STEP_COSTS: Mapping[str, float] = MappingProxyType(
    {"rms_norm": 2.5, "swiglu": 12.0, "add": 2.0, "argmax": 4.0}
)


@attrs.frozen(kw_only=True)
class Segment:
    """The kernel for a range of rows. candidates: best first, the chosen one at the head."""

    tokens: Rows
    candidates: tuple[Candidate, ...]
    rejected: Rejected = ()

    @property
    def kernel(self) -> KernelSpec:
        """The chosen kernel."""
        return self.candidates[0].kernel

    @property
    def lost(self) -> Rejected:
        """Why each other kernel of the op is not used here: those that would serve, then the rejected ones."""
        best = self.candidates[0]
        dearer = [
            (other.kernel.name, f"{_microseconds(other)}; {best.kernel.name} {_microseconds(best)}")
            for other in self.candidates[1:]
        ]
        return (*dearer, *self.rejected)


@attrs.frozen(kw_only=True)
class KernelPlan:
    """How a request is computed.

    segments: rising ranges of rows without gaps; empty where the op is computed by its parts.
    steps: ops of the decomposition, in order; parts: the plans of those that have weights.
    rejected: kernels that serve no segment, each with its (first) reason; where the op is decomposed also the
    fused ones that could have served.
    pool, decompose: what was planned from.
    """

    request: KernelRequest
    segments: tuple[Segment, ...] = ()
    steps: tuple[str, ...] = ()
    parts: tuple[KernelPlan, ...] = ()
    rejected: Rejected = ()
    pool: Pool = attrs.field(eq=False, repr=False)
    decompose: Decompose | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def decomposed(self) -> bool:
        """Whether the parts compute the op."""
        return not self.segments

    def cost_at(self, rows: int) -> float:
        """Microseconds at that many rows, measured where they are, else modelled."""
        for segment in self.segments:
            if covers(segment.tokens, (rows, rows)):
                request = attrs.evolve(self.request, tokens=(rows, segment.tokens[1]))
                return cost_at(segment.kernel, request, self.pool.cost_of)
        return sum(STEP_COSTS.get(step, 0.0) for step in self.steps) + sum(
            part.cost_at(rows) for part in self.parts
        )

    def starts(self) -> set[int]:
        """The fewest rows of every segment, those of the parts included."""
        own = {segment.tokens[0] for segment in self.segments}
        return own.union(*(part.starts() for part in self.parts))


def decomposer(
    decompositions: Mapping[str, tuple[str, ...]], parts: Sequence[KernelRequest] = ()
) -> Decompose:
    """A `decompose` from a table op -> ops in order.

    `linear` in the decomposition of an op with several parts stands for one `linear` per part: the requests in
    parts where these are given, else one for each of request.parts (without the trait `row_scale`, which
    a part with one global scale does not have).
    """

    def decompose(request: KernelRequest) -> tuple[KernelRequest, ...]:
        steps: list[KernelRequest] = []
        for op in decompositions.get(request.op, ()):
            whole = attrs.evolve(request, op=op)
            if op != "linear" or len(request.parts) < 2:
                steps.append(whole)
            elif parts:
                steps += [attrs.evolve(part, op=op, tokens=request.tokens) for part in parts]
            else:
                steps += _split(whole)
        return tuple(steps)

    return decompose


def _split(request: KernelRequest) -> list[KernelRequest]:
    k = None if request.shape is None else request.shape[1]
    return [
        attrs.evolve(
            request,
            shape=None if k is None else (rows, k),
            parts=(rows,),
            traits=request.traits - {"row_scale"},
        )
        for rows in request.parts
    ]


def _microseconds(candidate: Candidate) -> str:
    return f"{cost_in_words(candidate.cost)} {'measured' if candidate.measured else 'modelled'}"
