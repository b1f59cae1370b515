"""Findings whose causes are plugins, and the loading errors that have no code of their own."""

from __future__ import annotations

from pathlib import Path

import attrs

from fake_plugins import candidate, convention, conventions, module
from tiny_checkpoints import Tiny
from verify_tools import DOWN, found, run
from vtensors.errors import ClaimError, WeightValueError
from vtensors.manager import Plugins
from vtensors.records import Claim, ClaimRequest, Convention, Declaration, TensorSource, Weight
from vtensors.verification import open_tolerantly, structure_findings


def _plugins(record: Convention) -> Plugins:
    plugin = module("rival", conventions(record))
    return Plugins.discover(third_parties=[candidate("rival", plugin)], environ={})


def _claim_down(request: ClaimRequest) -> list[Claim]:
    group = next(group for group in request.groups if group.module == DOWN)
    record = convention("rival")
    return [
        Claim(
            module=DOWN,
            convention="rival",
            scheme="bf16",
            shape=(32, 48),
            roles={"codes": group.tensors["weight"]},
            form=record.forms[0],
        )
    ]


def _declare(warnings: tuple[str, ...] = ()) -> Declaration:
    return Declaration(convention="rival", scheme_of=lambda name: None, summary="rival", warnings=warnings)


def _refuse(claim: Claim, source: TensorSource) -> Weight:
    raise WeightValueError("the rival dislikes it", tensor=claim.roles["codes"].name, seen="3.0")


def test_a_tensor_that_two_conventions_claim_is_found(tmp_path: Path) -> None:
    record = attrs.evolve(convention("rival"), claim=_claim_down, declare=lambda files: _declare())
    report = run(Tiny.plain_model().save(tmp_path / "model"), plugins=_plugins(record))
    (finding,) = found(report, "claimed-twice")
    assert finding.tensor == f"{DOWN}.weight"
    assert "rival-dist" in finding.seen


def test_a_convention_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    def fail(request: ClaimRequest) -> list[Claim]:
        raise ValueError("broken")

    record = attrs.evolve(convention("rival"), claim=fail, declare=lambda files: _declare())
    report = run(Tiny.plain_model().save(tmp_path / "model"), plugins=_plugins(record))
    assert [finding.code for finding in report.findings] == ["failed-convention"]
    assert "ValueError: broken" in report.findings[0].seen


def test_a_conventions_own_remark_is_passed_on(tmp_path: Path) -> None:
    record = attrs.evolve(convention("rival"), declare=lambda files: _declare(("an old form",)))
    report = run(Tiny.plain_model().save(tmp_path / "model"), plugins=_plugins(record))
    assert [(f.code, f.seen) for f in report.findings] == [("convention-note", "an old form")]


def test_a_third_partys_own_check_of_values_is_asked(tmp_path: Path) -> None:
    record = attrs.evolve(
        convention("rival", overrides=("plain",)),
        claim=_claim_down,
        declare=lambda files: _declare(),
        read=_refuse,
    )
    report = run(Tiny.plain_model().save(tmp_path / "model"), plugins=_plugins(record))
    (finding,) = found(report, "bad-values")
    assert (finding.tensor, finding.seen) == (f"{DOWN}.weight", "the rival dislikes it (seen: 3.0)")


def test_a_refusal_without_a_code_of_its_own_is_still_listed(tmp_path: Path) -> None:
    opened = open_tolerantly(Tiny.modelopt().save(tmp_path / "model"))
    assert opened.checkpoint is not None
    name = f"{DOWN}.weight_scale_2"
    problem = ClaimError("something new", tensor=name)
    changed = attrs.evolve(opened.checkpoint.accounting, problems=(problem,))
    opened.checkpoint.__dict__["accounting"] = changed
    assert [(f.code, f.tensor) for f in structure_findings(opened)] == [("refused", name)]
