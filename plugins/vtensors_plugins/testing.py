"""`vtensors.testing`: pytest classes that a plugin author runs against a plugin.

    class TestInt8Rows(vtensors.testing.ConventionConformance):
        convention = CONVENTION

        def example(self, folder):
            ...  # write a small checkpoint into folder
            return vtensors.testing.Example(directory=folder, expected={"model.layers.0.mlp.up_proj": w})

The plugin must be installed, because its records are used as a user's would be: through the entry point.
The built-in conventions and schemes pass the same classes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

import vtensors
from vtensors.claiming import claim_by_forms
from vtensors.configs import CONFIG, HF_QUANT, ConfigFiles
from vtensors.errors import VtensorsError
from vtensors.grouping import group_tensors
from vtensors.manager import default_plugins
from vtensors.record_checks import check_record
from vtensors.records import Claim, ClaimRequest, Convention, Scheme, Weight
from vtensors.registry import Owned
from vtensors.tensors import TensorInfo
from vtensors_plugins.kernel_conformance import KernelConformance, KernelExample
from vtensors_plugins.safetensors_edits import NAN_BYTES, StoredCheckpoint
from vtensors_plugins.weight_checks import (
    check_dtypes,
    check_equal,
    check_moves,
    check_rows,
    import_weight_class,
)

__all__ = ["ConventionConformance", "Example", "KernelConformance"]
__all__ += ["KernelExample", "SchemeConformance", "WeightExample"]

# Dtypes that no known convention stores a weight or a scale in.
_STRANGE_DTYPES = ("C64", "BOOL", "I64", "U64")


@attrs.frozen(kw_only=True)
class Example:
    """A checkpoint in the convention. Keep it small: it is written again for every tensor that is changed.

    directory: holds config.json and one or more `.safetensors` files.
    expected: module name -> its weight [N, K] float32 as the publisher computes it, for every module of the
    convention; the other modules in the directory belong to other conventions.
    """

    directory: Path
    expected: Mapping[str, torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class WeightExample:
    """A weight in the scheme, and what it must give. expected: [N, K] float32."""

    weight: Any
    expected: torch.Tensor


class ConventionConformance(ABC):
    """Checks of one convention. Subclass it, name the class `Test...`, set `convention`, give an example."""

    convention: ClassVar[Convention]

    @abstractmethod
    def example(self, folder: Path) -> Example:
        """A checkpoint written into the empty folder."""

    def test_its_record_is_valid_and_registered(self) -> None:
        """The record's fields are sound, each form says where it comes from, and the registry has it."""
        problem = check_record(self.convention)
        _require(problem is None, f"the convention '{self.convention.name}' {problem}")
        owned = default_plugins().registry.conventions.get(self.convention.name)
        _require_registered(owned, "convention", self.convention.name)
        _require(bool(self.convention.summary), "the convention has no summary")
        for form in self.convention.forms:
            _require(bool(form.formula), f"a form of '{form.scheme}' has no formula")
            _require(bool(form.source), f"a form of '{form.scheme}' has no source")
            codes = form.tensors[0]
            _require(codes.required, f"'{codes.suffix}' carries the codes of '{form.scheme}' but is optional")
            _require(not codes.sense, f"'{codes.suffix}' carries the codes of '{form.scheme}', not a scale")

    def test_it_claims_its_own_modules_and_no_other(self, tmp_path: Path) -> None:
        """Exactly the expected modules are claimed by this convention, in a scheme that is registered."""
        example = self._example(tmp_path)
        checkpoint = vtensors.open_checkpoint(example.directory)
        claimed = {
            name for name, found in checkpoint.modules.items() if found.convention == self.convention.name
        }
        wanted = set(example.expected)
        _require(wanted <= claimed, f"not claimed: {sorted(wanted - claimed)}")
        _require(claimed <= wanted, f"claimed, but not in Example.expected: {sorted(claimed - wanted)}")
        for name in wanted:
            scheme = checkpoint.modules[name].scheme
            _require_registered(default_plugins().registry.schemes.get(scheme), "scheme", scheme)

    def test_it_declares_nothing_of_foreign_configurations(self) -> None:
        """No configuration, or that of another quantization method, is not this convention's."""
        if self.convention.quant_methods:
            foreign = {"quantization_config": {"quant_method": "of-nobody"}}
            for config in (None, {}, foreign):
                declared = self.convention.declare(ConfigFiles(config=config))
                _require(declared is None, f"declares something of the foreign configuration {config}")

    def test_values_are_the_publishers_bit_for_bit(self, tmp_path: Path) -> None:
        """Every expected module dequantizes to exactly the expected values (the sign of 0 aside)."""
        for name, weight, expected in self._weights(tmp_path):
            check_equal(weight.dequantize(torch.float32), expected, what=name)

    def test_rows_are_cut_exactly(self, tmp_path: Path) -> None:
        """Any range of rows, dequantized, is that range of the whole."""
        for name, weight, expected in self._weights(tmp_path):
            check_rows(weight, expected, what=name)

    def test_a_missing_tensor_is_refused(self, tmp_path: Path) -> None:
        """Without any one tensor that its form requires, the module cannot be read."""
        for claim, stored, info in self._required(tmp_path):
            self._refused(claim, stored.without(info.name), tmp_path, f"without {info.name}")

    def test_another_dtype_is_refused(self, tmp_path: Path) -> None:
        """With any one required tensor in another dtype, the module cannot be read."""
        for claim, stored, info in self._required(tmp_path):
            known = {
                dtype for form in self.convention.forms for place in form.tensors for dtype in place.dtypes
            }
            dtype = next(dtype for dtype in _STRANGE_DTYPES if dtype not in known)
            changed = stored.with_tensor(info.name, dtype, info.shape, beside=info.name)
            self._refused(claim, changed, tmp_path, f"with {info.name} as {dtype}")

    def test_a_tensor_without_a_place_is_refused(self, tmp_path: Path) -> None:
        """One more scale beside the tensors of the form, and the module cannot be read."""
        seen: set[str] = set()
        for claim, stored, info in self._required(tmp_path):
            owner = info.name.rpartition(".")[0]
            if owner not in seen:
                seen.add(owner)
                changed = stored.with_tensor(f"{owner}.of_nobody_scale", "F32", (1,), beside=info.name)
                self._refused(claim, changed, tmp_path, f"with {owner}.of_nobody_scale")

    def test_a_nan_scale_is_refused(self, tmp_path: Path) -> None:
        """A NaN in any required scale is refused when the module is read or its values are checked."""
        for claim, stored, info in self._required(tmp_path):
            role = next(role for role, found in claim.roles.items() if found.name == info.name)
            place = next(place for place in claim.form.tensors if place.role == role)
            if place.sense and info.dtype in NAN_BYTES:
                self._refused(claim, stored.with_nan(info.name), tmp_path, f"with NaN in {info.name}")

    def _example(self, tmp_path: Path) -> Example:
        folder = tmp_path / "example"
        folder.mkdir()
        example = self.example(folder)
        _require(bool(example.expected), "the example has no expected modules")
        return example

    def _weights(self, tmp_path: Path) -> Iterator[tuple[str, Weight, torch.Tensor]]:
        example = self._example(tmp_path)
        checkpoint = vtensors.open_checkpoint(example.directory)
        for name, expected in example.expected.items():
            weight = checkpoint.read(name)
            module = checkpoint.modules[name]
            _require(weight.scheme == module.scheme, f"{name}: reads as {weight.scheme}, not {module.scheme}")
            for shape in (tuple(module.shape), tuple(weight.shape)):
                _require(shape == tuple(expected.shape), f"{name}: {shape} is not {tuple(expected.shape)}")
            _require(weight.nbytes > 0, f"{name}: a weight of no bytes")
            yield name, weight, expected

    def _required(self, tmp_path: Path) -> Iterator[tuple[Claim, StoredCheckpoint, TensorInfo]]:
        """Every required tensor of the expected modules, once, with the claim that it belongs to."""
        example = self._example(tmp_path)
        stored = StoredCheckpoint.load(example.directory)
        seen: set[str] = set()
        for claim in _claims(self.convention, stored):
            required = {place.role for place in claim.form.tensors if place.required}
            for role, info in claim.roles.items():
                if claim.module in example.expected and role in required and info.name not in seen:
                    seen.add(info.name)
                    yield claim, stored, info
        _require(bool(seen), "the convention claims none of the expected modules")

    def _refused(self, claim: Claim, changed: StoredCheckpoint, tmp_path: Path, what: str) -> None:
        directory = changed.save(tmp_path / f"changed-{len(list(tmp_path.iterdir()))}")

        def read() -> None:
            weight = vtensors.open_checkpoint(directory).read(claim.module)
            weight.check_values({role: info.name for role, info in claim.roles.items()})

        _require_refusal(read, f"{claim.module} {what}")


class SchemeConformance(ABC):
    """Checks of one scheme and its Weight class. Subclass it as `Test...`, set `scheme`, give weights."""

    scheme: ClassVar[Scheme]

    @abstractmethod
    def weights(self) -> list[WeightExample]:
        """Sound weights with what they dequantize to; rows a prime number, for example, to see tails."""

    def damaged(self) -> list[Any]:
        """Weights whose values `check_values` must refuse: NaN, infinite, negative scales."""
        return []

    def test_its_record_is_valid_and_registered(self) -> None:
        """The record's fields are sound, its class can be imported, and the registry has it."""
        problem = check_record(self.scheme)
        _require(problem is None, f"the scheme '{self.scheme.name}' {problem}")
        owned = default_plugins().registry.schemes.get(self.scheme.name)
        _require_registered(owned, "scheme", self.scheme.name)
        import_weight_class(self.scheme)

    def test_weights_are_of_its_class_and_say_its_name(self) -> None:
        """Each example is of the record's class and the scheme's name, and has its size and shape."""
        weight_class = import_weight_class(self.scheme)
        for example in self._examples():
            weight = example.weight
            _require(isinstance(weight, weight_class), f"{type(weight)} is not the class {weight_class}")
            _require(weight.scheme == self.scheme.name, f"{weight.scheme} is not {self.scheme.name}")
            _require(tuple(weight.shape) == tuple(example.expected.shape), f"the shape is {weight.shape}")
            _require(weight.nbytes > 0, "a weight of no bytes")

    def test_dequantize_is_exact_and_rounds_once(self) -> None:
        """float32 is the expected bit for bit; bfloat16 and float16 are that, rounded once."""
        for example in self._examples():
            check_equal(example.weight.dequantize(torch.float32), example.expected, what=self.scheme.name)
            check_dtypes(example.weight, example.expected, what=self.scheme.name)

    def test_rows_are_cut_exactly(self) -> None:
        """Any range of rows, dequantized, is that range of the whole."""
        for example in self._examples():
            check_rows(example.weight, example.expected, what=self.scheme.name)

    def test_to_keeps_the_values(self) -> None:
        """Moving to a device changes no value."""
        for example in self._examples():
            check_moves(example.weight, example.expected, what=self.scheme.name)

    def test_sound_values_pass_and_damaged_ones_are_refused(self) -> None:
        """check_values accepts every example and refuses every damaged weight."""
        for example in self._examples():
            example.weight.check_values({})
        for number, weight in enumerate(self.damaged()):
            _require_refusal(lambda weight=weight: weight.check_values({}), f"damaged weight {number}")  # type: ignore[misc]

    def _examples(self) -> list[WeightExample]:
        examples = self.weights()
        _require(bool(examples), "weights() gives no example")
        return examples


def _claims(convention: Convention, stored: StoredCheckpoint) -> list[Claim]:
    groups = group_tensors(tensor.info for tensor in stored.tensors.values()).groups
    config, hf_quant = (_json(stored.directory / name) for name in (CONFIG, HF_QUANT))
    declaration = convention.declare(ConfigFiles(config=config, hf_quant=hf_quant))
    request = ClaimRequest(groups=groups, declaration=declaration)
    answers = convention.claim(request) if convention.claim else claim_by_forms(convention, request)
    return [answer for answer in answers if isinstance(answer, Claim)]


def _json(path: Path) -> Mapping[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _require(condition: bool, message: str) -> None:
    """pytest rewrites no assert in an installed module, so the message is made here."""
    if not condition:
        raise AssertionError(message)


def _require_registered(owned: Owned[Any] | None, kind: str, name: str) -> None:
    states = ", ".join(f"{status.name} {status.error}" for status in default_plugins().quarantined)
    _require(
        owned is not None,
        f"the {kind} '{name}' is not registered: install its package (pip install -e .) and look at "
        f"`vtensors plugins`; left out: {states or 'none'}",
    )


def _require_refusal(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except VtensorsError:
        return
    raise AssertionError(f"accepted, but must be refused with a VtensorsError: {what}")
