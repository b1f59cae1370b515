"""`vtensors.testing.KernelConformance`: what a kernel promises by its op, held against the op in plain torch.

class TestMyLinear(vtensors.testing.KernelConformance):
    kernel = KERNEL

    def examples(self):
        return [vtensors.testing.KernelExample(weights=(my_weight,))]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from vtensors.kernel_binding import prepare_weights
from vtensors.manager import default_plugins
from vtensors.record_checks import check_record
from vtensors.records import KernelRequest, KernelSpec
from vtensors_formats import Weight
from vtensors_kernels.ops import op
from vtensors_plugins.architectures.fusing import Part, expert_traits, traits_of
from vtensors_plugins.op_calls import OpCall, op_call

_ROWS = 5  # at most so many more than the fewest that the kernel serves


@attrs.frozen(kw_only=True, eq=False)
class KernelExample:
    """Weights of one call, in the order of the op's contract (`vtensors_kernels.ops`), all of one scheme and K.

    activations: as in `KernelRequest`. experts, chosen: of a mixture, whose weights are gate, up and down of each
    expert in turn.
    """

    weights: tuple[Weight, ...]
    activations: str = "16bit"
    experts: int = 0
    chosen: int = 0


class KernelConformance(ABC):
    """Checks of one kernel. Subclass it, name the class `Test...`, set `kernel`, give examples that it serves.

    device, dtype: where and in what it is called. tolerance: most of ‖y - reference‖ / ‖reference‖, the reference in
    float32 over the values that the weights dequantize to.
    """

    kernel: ClassVar[KernelSpec]
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[str] = "float32"
    tolerance: ClassVar[float] = 1e-2

    @abstractmethod
    def examples(self) -> list[KernelExample]:
        """Weights that the kernel serves; sizes that are no powers of two, for example, to see tails."""

    def test_its_record_is_valid_and_registered(self) -> None:
        """The record's fields are sound, its op is known, and the registry has it."""
        problem = check_record(self.kernel)
        _require(problem is None, f"the kernel '{self.kernel.name}' {problem}")
        op(self.kernel.op)
        known = self.kernel.name in default_plugins().registry.kernels
        _require(known, f"the kernel '{self.kernel.name}' is not registered: install its package")

    def test_it_serves_the_examples_and_says_why_not_in_one_line(self) -> None:
        """`refuse` gives None for each example, and a line or None where the shape is not known."""
        for request, _ in self._requests():
            reason = self.kernel.refuse(request)
            _require(reason is None, f"refuses an example: {reason}")
            unknown = self.kernel.refuse(attrs.evolve(request, shape=None, parts=()))
            sound = unknown is None or (isinstance(unknown, str) and unknown != "" and "\n" not in unknown)
            _require(sound, f"refuses a request without a shape with {unknown!r}, not with one line")

    def test_its_cost_is_a_number_of_microseconds(self) -> None:
        """`cost` is finite and not negative, with a shape and without."""
        for request, _ in self._requests():
            for asked in (request, attrs.evolve(request, shape=None, parts=())):
                cost = self.kernel.cost(asked) if callable(self.kernel.cost) else self.kernel.cost
                _require(math.isfinite(cost) and cost >= 0, f"costs {cost} for the shape {asked.shape}")

    def test_its_self_test_passes(self) -> None:
        """`probe`, where there is one, raises nothing for the examples."""
        for request, _ in self._requests():
            if self.kernel.probe is not None:
                self.kernel.probe(request)

    def test_its_layout_has_a_size(self) -> None:
        """A prepared weight says how many bytes it has."""
        for request, example in self._requests():
            prepared = prepare_weights(self.kernel, self._weights(example), request)
            if self.kernel.layout != "stored":
                _require(getattr(prepared, "nbytes", 0) > 0, "a prepared weight without `nbytes`")

    def test_results_are_the_ops(self) -> None:
        """For several numbers of rows: shape and dtype of the contract, and values within the tolerance."""
        for request, example in self._requests():
            call = self._bound(example, request)
            for rows in self._rows():
                given = self._call(example, request, rows)
                problem = given.difference(call(*given.arguments), self.tolerance)
                _require(problem is None, f"{self.kernel.name}, {rows} rows of {request.shape}: {problem}")

    def test_rows_do_not_touch_each_other(self) -> None:
        """What stands in one row changes no other one, be it NaN."""
        for request, example in self._requests():
            rows = self._rows()[-1]
            given = self._call(example, request, rows)
            if rows > 1 and given.floating:
                call = self._bound(example, request)
                problem = given.difference(call(*given.spoilt().arguments), self.tolerance, rows=rows - 1)
                _require(
                    problem is None, f"{self.kernel.name} with NaN in the last of {rows} rows: {problem}"
                )

    def test_arguments_and_weights_stay_as_they_were(self) -> None:
        """A call changes neither what it is given nor the stored weights, and gives the same twice."""
        for request, example in self._requests():
            weights = self._weights(example)
            before = [tensor.clone() for weight in weights for tensor in weight.stored()]
            call = self.kernel.bind(prepare_weights(self.kernel, weights, request), request)
            given = self._call(example, request, self._rows()[-1])
            kept = given.copied()
            first, second = call(*given.arguments), call(*given.arguments)
            _require(bool(torch.equal(first, second)), "the same call gives something else the second time")
            _require(kept.same_arguments(given), "the call changed one of its arguments")
            after = [tensor for weight in weights for tensor in weight.stored()]
            same = all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(before, after, strict=True))
            _require(same, "the call, or what came before it, changed a stored weight")

    def _requests(self) -> Iterator[tuple[KernelRequest, KernelExample]]:
        examples = self.examples()
        _require(bool(examples), "examples() gives none")
        device = torch.device(self.device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        for example in examples:
            parts = [
                Part(name=f"weight {place}", weight=weight, executed=example.activations)
                for place, weight in enumerate(example.weights)
            ]
            rows = [weight.shape[0] for weight in example.weights]
            mixture = self.kernel.op == "experts"
            rows = rows[:3] if mixture else rows
            traits = expert_traits(parts, example.experts) if mixture else traits_of(parts, shared=False)
            request = KernelRequest(
                op=self.kernel.op,
                scheme=example.weights[0].scheme,
                activations=example.activations,
                device=self.device,
                capability=capability,
                dtype=self.dtype,
                shape=(sum(rows[:2] if mixture else rows), example.weights[0].shape[1]),
                parts=tuple(rows),
                tokens=self.kernel.tokens,
                traits=traits,
                experts=example.experts,
                chosen=example.chosen,
            )
            yield request, example

    def _rows(self) -> list[int]:
        first, last = self.kernel.tokens
        return list(range(first, first + _ROWS + 1 if last is None else min(first + _ROWS, last) + 1))

    def _weights(self, example: KernelExample) -> list[Any]:
        return [weight.to(self.device) for weight in example.weights]

    def _bound(self, example: KernelExample, request: KernelRequest) -> Any:
        return self.kernel.bind(prepare_weights(self.kernel, self._weights(example), request), request)

    def _call(self, example: KernelExample, request: KernelRequest, rows: int) -> OpCall:
        return op_call(request, self._weights(example), rows)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().contiguous().view(torch.uint8)


def _require(condition: bool, message: str) -> None:
    """pytest rewrites no assert in an installed module, so the message is made here."""
    if not condition:
        raise AssertionError(message)
