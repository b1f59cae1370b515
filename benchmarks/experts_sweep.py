"""Forms and grids of the grouped experts at a few tokens, timed: what `experts/*form.py` are tuned by.

    python benchmarks/experts_sweep.py [--tokens 1,2,4,8] [--scheme nvfp4] [--seconds 50] [--layers 40]

The chain of a decode step's layer is timed, in one CUDA graph over many layers: norm, router, choice, gate_up, down,
each launch dependent on the one before. Shapes are those of the 35B with its shared expert. `chain` is the whole layer,
`experts` what is left of it without norm, router and choice, `isolated` the launches of the experts alone. Every result
must have the bits of the shipped form; `*` marks that form, and both ways that a few tokens may go, `gate_up, down` and
`batch`, are shown beside it. Behind the tokens stands how many experts a layer reads and the time that their bytes take
at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import time

import attrs
import torch
from cuda_device import require_cuda
from experts import EXPERTS, HIDDEN, TOP, Layers
from experts_tunings import tunings
from graph_timing import time_calls
from torch import Tensor

from vtensors_kernels.experts.launches import GroupedExperts
from vtensors_kernels.plain.probe import random_matrix
from vtensors_kernels.plain.small import SmallLinear
from vtensors_kernels.steps.rms_norm import RMSNormKernel
from vtensors_kernels.steps.router import RouterTopk

DTYPE = torch.bfloat16
SHOWN, ALWAYS_SHOWN = 8, 3
_BYTES_PER_US = 4.3e6


@attrs.frozen(kw_only=True)
class Chain:
    """What stands before the experts of every layer."""

    norm: RMSNormKernel
    routers: tuple[SmallLinear, ...]
    choose: RouterTopk

    @classmethod
    def make(cls, layers: int) -> Chain:
        """Routers of random weights, one a layer."""
        return cls(
            norm=RMSNormKernel(torch.ones(HIDDEN, device="cuda"), 1e-6, DTYPE),
            routers=tuple(
                SmallLinear(random_matrix(EXPERTS + 1, HIDDEN, DTYPE, "cuda", seed=seed), DTYPE)
                for seed in range(layers)
            ),
            choose=RouterTopk(TOP, DTYPE),
        )

    def chosen(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normed x, experts, their weights, the shared expert's gate."""
        normed = self.norm(x)
        logits = self.routers[layer](normed)
        return (normed, *self.choose(logits[:, :EXPERTS]), logits[:, EXPERTS:])


def sweep(layers: Layers, chain: Chain, m: int, until: float) -> None:
    """Prints the fastest tunings for m tokens, and the shipped one."""
    count = len(layers.packed)
    x = torch.randn(m, HIDDEN, device="cuda").to(DTYPE)
    given = [chain.chosen(x, layer) for layer in range(count)]
    distinct = sum(len(chosen.unique()) for _, chosen, _, _ in given) / count
    sizes = [
        matrix.blocks.nbytes // (EXPERTS + 1) for matrix in (layers.packed[0].gate_up, layers.packed[0].down)
    ]
    floor = (distinct + 1) * sum(sizes) / _BYTES_PER_US
    before = time_calls(
        [lambda layer=layer: chain.chosen(x, layer) for layer in range(count)], graph_us=1000.0, replays=7
    ).median
    print(
        f"M={m}: {distinct:.1f} experts and the shared one, {floor:.1f} us of bytes; "
        f"norm, router, choice {before:.2f} us",
        flush=True,
    )
    found: list[tuple[float, float, str]] = []
    wanted: list[Tensor] = []
    for name, tuning in tunings(m, layers.packed[0].format.block_bytes):
        if time.perf_counter() > until:
            print(f"M={m}: out of time before {name!r}")
            break
        calls = [GroupedExperts(packed, DTYPE, tuning) for packed in layers.packed]

        def alone(layer: int, calls: list[GroupedExperts] = calls) -> Tensor:
            normed, chosen, weights, gate = given[layer]
            return calls[layer](normed, chosen, weights, gate, None, x)

        def chained(layer: int, calls: list[GroupedExperts] = calls) -> Tensor:
            normed, chosen, weights, gate = chain.chosen(x, layer)
            return calls[layer](normed, chosen, weights, gate, None, x)

        outputs = [alone(layer) for layer in range(3)]
        wanted = wanted or outputs
        if not all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True)):
            print(f"M={m} WRONG {name}", flush=True)
            continue
        isolated, whole = (
            time_calls(
                [lambda layer=layer, run=run: run(layer) for layer in range(count)],
                graph_us=1500.0,
                replays=7,
            )
            for run in (alone, chained)
        )
        found.append((whole.median, isolated.median, name))
    best = sorted(found)[:SHOWN]
    for whole_us, isolated_us, name in [*best, *(one for one in found[:ALWAYS_SHOWN] if one not in best)]:
        print(
            f"M={m} chain {whole_us:6.2f} us  experts {whole_us - before:6.2f} us  "
            f"isolated {isolated_us:6.2f} us  {name}",
            flush=True,
        )


def main() -> None:
    """Sweep what is asked for until the time is up, each number of tokens for its share."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,2,4,8")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--layers", type=int, default=40)
    args = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    layers, chain = Layers.make(args.scheme, shared=True, count=args.layers), Chain.make(args.layers)
    tokens = [int(word) for word in args.tokens.split(",")]
    for m in tokens:
        for _, tuning in tunings(m, layers.packed[0].format.block_bytes):
            GroupedExperts(layers.packed[0], DTYPE, tuning)  # compiled before the clock runs
    begin = time.perf_counter()
    for place, m in enumerate(tokens):
        sweep(layers, chain, m, begin + args.seconds * (place + 1) / len(tokens))


if __name__ == "__main__":
    main()
