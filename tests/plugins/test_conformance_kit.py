"""The kit finds what it is for: each fault of a convention or weight fails the check made for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import builtin_examples as examples
import vtensors
import vtensors_plugins.testing as kit
from builtin_examples import UP
from vtensors.claiming import claim_by_forms
from vtensors.errors import VtensorsError
from vtensors.manager import Plugins, default_plugins
from vtensors.records import Claim, Convention, Refusal
from vtensors.tensors import TensorInfo
from vtensors_formats import FP8Weight
from vtensors_formats.schemes import BUILTIN_SCHEMES
from vtensors_plugins.conventions import modelopt
from vtensors_plugins.testing import ConventionConformance, Example, SchemeConformance, WeightExample
from vtensors_plugins.weight_checks import check_equal

CHECKS = [name for name in vars(ConventionConformance) if name.startswith("test_")]
SCHEME_CHECKS = [name for name in vars(SchemeConformance) if name.startswith("test_")]


def failing(
    convention: Convention, tmp_path: Path, *, expected: Callable[[Any], Any] = lambda x: x
) -> set[str]:
    """The checks that fail for the convention, on a ModelOpt FP8 checkpoint."""

    class Subject(ConventionConformance):
        def example(self, folder: Path) -> Example:
            modules = {UP: examples.fp8_tensor()}
            written = examples.write(folder, modules, examples.modelopt("FP8"))
            return Example(directory=folder, expected=expected(written))

    subject = Subject()
    type(subject).convention = convention
    failed = set()
    for name in CHECKS:
        folder = tmp_path / name
        folder.mkdir()
        wants_folder = "tmp_path" in getattr(ConventionConformance, name).__annotations__
        try:
            getattr(subject, name)(*([folder] if wants_folder else []))
        except (AssertionError, VtensorsError):
            failed.add(name)
    return failed


@pytest.fixture
def enable(monkeypatch: pytest.MonkeyPatch) -> Callable[[Convention], Convention]:
    """Puts a changed `modelopt` convention in the place of the built-in one."""

    def put(convention: Convention) -> Convention:
        plugins = default_plugins()
        conventions = dict(plugins.registry.conventions)
        conventions["modelopt"] = attrs.evolve(conventions["modelopt"], record=convention)
        registry = attrs.evolve(plugins.registry, conventions=conventions)
        monkeypatch.setattr(plugins, "registry", registry)
        return convention

    return put


Enable = Callable[[Convention], Convention]


def reading(change: Callable[[FP8Weight], Any]) -> Convention:
    """modelopt, whose weights are changed after they were read."""

    def read(claim: Claim, source: Any) -> Any:
        return change(modelopt.read(claim, source))  # type: ignore[arg-type]

    return attrs.evolve(modelopt.CONVENTION, read=read)


def loosened(**changes: Any) -> Convention:
    """modelopt, with every tensor of its forms changed."""
    forms = tuple(
        attrs.evolve(form, tensors=tuple(attrs.evolve(tensor, **changes) for tensor in form.tensors))
        for form in modelopt.CONVENTION.forms
    )
    return attrs.evolve(modelopt.CONVENTION, forms=forms)


def test_the_kit_passes_a_sound_convention(tmp_path: Path) -> None:
    assert failing(modelopt.CONVENTION, tmp_path) == set()


def test_wrong_values_are_found(tmp_path: Path, enable: Enable) -> None:
    wrong = enable(reading(lambda weight: attrs.evolve(weight, scale=1 / weight.scale)))
    failed = failing(wrong, tmp_path)
    assert "test_values_are_the_publishers_bit_for_bit" in failed


def test_wrong_rows_are_found(tmp_path: Path, enable: Enable) -> None:
    class Shifted(FP8Weight):
        def rows(self, start: int, stop: int) -> Any:
            return super().rows(max(0, start - 1), max(0, start - 1) + stop - start)

    def shift(weight: FP8Weight) -> Shifted:
        return Shifted(codes=weight.codes, scale=weight.scale)

    assert failing(enable(reading(shift)), tmp_path) == {"test_rows_are_cut_exactly"}


def test_a_convention_that_checks_no_values_is_found(tmp_path: Path, enable: Enable) -> None:
    class Trusting(FP8Weight):
        def check_values(self, names: Any) -> None:
            pass

    def trust(weight: FP8Weight) -> Trusting:
        return Trusting(codes=weight.codes, scale=weight.scale)

    assert failing(enable(reading(trust)), tmp_path) == {"test_a_nan_scale_is_refused"}


def test_a_convention_that_takes_surplus_tensors_is_found(tmp_path: Path, enable: Enable) -> None:
    def claim(request: Any) -> list[Claim | Refusal]:
        known = {place.suffix for form in modelopt.CONVENTION.forms for place in form.tensors}
        surplus: dict[str, dict[str, TensorInfo]] = {}
        groups = []
        for group in request.groups:
            kept = {suffix: info for suffix, info in group.tensors.items() if suffix in known}
            rest = {suffix: info for suffix, info in group.tensors.items() if suffix not in known}
            groups.append(attrs.evolve(group, tensors=kept))
            surplus[group.module] = rest
        claims = claim_by_forms(modelopt.CONVENTION, attrs.evolve(request, groups=groups))
        return [attrs.evolve(claim, roles={**claim.roles, **surplus[claim.module]}) for claim in claims]

    greedy = enable(attrs.evolve(modelopt.CONVENTION, claim=claim))
    assert failing(greedy, tmp_path) == {"test_a_tensor_without_a_place_is_refused"}


def test_a_module_that_is_not_claimed_is_found(tmp_path: Path) -> None:
    failed = failing(modelopt.CONVENTION, tmp_path, expected=lambda found: {**found, "model.gone": found[UP]})
    assert "test_it_claims_its_own_modules_and_no_other" in failed


def test_a_module_that_is_claimed_without_being_expected_is_found(tmp_path: Path) -> None:
    failed = failing(modelopt.CONVENTION, tmp_path, expected=lambda found: {"lm_head": found[UP]})
    assert "test_it_claims_its_own_modules_and_no_other" in failed


def test_a_form_without_source_or_formula_is_found(tmp_path: Path) -> None:
    for number, (source, formula) in enumerate((("", "w"), ("here", ""))):
        forms = tuple(
            attrs.evolve(form, source=source, formula=formula) for form in modelopt.CONVENTION.forms
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        failed = failing(attrs.evolve(modelopt.CONVENTION, forms=forms), folder)
        assert failed == {"test_its_record_is_valid_and_registered"}


def test_a_form_whose_first_tensor_is_optional_is_found(tmp_path: Path) -> None:
    assert "test_its_record_is_valid_and_registered" in failing(loosened(required=False), tmp_path)


def test_a_convention_that_declares_everything_is_found(tmp_path: Path, enable: Enable) -> None:
    def declare(files: Any) -> Any:
        return modelopt.CONVENTION.declare(
            attrs.evolve(files, config={"quantization_config": examples.modelopt("FP8")})
        )

    failed = failing(enable(attrs.evolve(modelopt.CONVENTION, declare=declare)), tmp_path)
    assert failed == {"test_it_declares_nothing_of_foreign_configurations"}


def test_a_convention_that_is_not_installed_is_named(tmp_path: Path) -> None:
    stranger = attrs.evolve(modelopt.CONVENTION, name="stranger")
    assert "test_its_record_is_valid_and_registered" in failing(stranger, tmp_path)


def scheme_failing(weight: Any, expected: torch.Tensor, damaged: list[Any] | None = None) -> set[str]:
    """The checks of a scheme that fail."""

    class Subject(SchemeConformance):
        scheme = next(scheme for scheme in BUILTIN_SCHEMES if scheme.name == "fp8-tensor")

        def weights(self) -> list[WeightExample]:
            return [WeightExample(weight=weight, expected=expected)]

        def damaged(self) -> list[Any]:
            return damaged or []

    failed = set()
    for name in SCHEME_CHECKS:
        try:
            getattr(Subject(), name)()
        except AssertionError:
            failed.add(name)
    return failed


def test_the_faults_of_a_weight_class_are_found() -> None:
    codes, scale = examples.e4m3_codes(), torch.tensor(0.0123)
    sound = FP8Weight(codes=codes, scale=scale)
    expected = codes.float() * scale

    class Hasty(FP8Weight):
        def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return self.codes.to(dtype) * self.scale.to(dtype)

    assert scheme_failing(sound, expected) == set()
    assert "test_dequantize_is_exact_and_rounds_once" in scheme_failing(sound, expected * 1.0000002)
    assert scheme_failing(Hasty(codes=codes, scale=scale), expected) == {
        "test_dequantize_is_exact_and_rounds_once"
    }
    assert scheme_failing(sound, expected, damaged=[sound]) == {
        "test_sound_values_pass_and_damaged_ones_are_refused"
    }


def test_the_message_of_unequal_values_names_the_first_place() -> None:
    good = torch.zeros(2, 3)
    bad = good.clone()
    bad[1, 2] = 7
    with pytest.raises(AssertionError, match=r"1 of 6 values differ, the first at \[1, 2\]: found 7.0"):
        check_equal(bad, good, what="w")


def test_the_sign_of_a_zero_does_not_count() -> None:
    check_equal(torch.tensor([-0.0]), torch.tensor([0.0]), what="w")


def test_the_kit_uses_the_plugins_of_the_environment() -> None:
    assert isinstance(default_plugins(), Plugins)
    assert vtensors.testing is kit
