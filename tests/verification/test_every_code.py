"""Each code: a checkpoint that has the fault gives it, and names it; the same checkpoint without has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_checkpoints import Tiny
from verify_cases import CASES
from verify_tools import found, run
from vtensors.verification import CODES

# Their causes lie in plugins: tests/verification/test_plugins.py.
OF_PLUGINS = {"claimed-twice", "failed-convention", "convention-note", "bad-values", "refused"}


@pytest.mark.parametrize("code", [code for code in CASES if code not in OF_PLUGINS])
def test_the_fault_is_found_and_named(code: str, tmp_path: Path) -> None:
    case = CASES[code]
    against = case.against(tmp_path / "reference") if case.against is not None else None
    report = run(case.make(tmp_path / "checkpoint"), against=against, **case.options)
    findings = found(report, code)
    assert findings, [f"{f.code} {f.tensor}: {f.seen}" for f in report.findings]
    names = {finding.tensor for finding in findings}
    assert case.tensor in names or not case.tensor
    assert any(
        case.seen in finding.seen for finding in findings if finding.tensor == case.tensor or not case.tensor
    )
    for finding in findings:
        assert finding.severity == CODES[code].severity
        assert all((finding.tensor, finding.seen, finding.expected, finding.fix))


def test_every_code_has_a_case() -> None:
    assert set(CASES) | OF_PLUGINS == set(CODES)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5", "qwen3_5_moe"])
def test_an_unharmed_model_has_no_findings(family: str, shards: int, tmp_path: Path) -> None:
    report = run(Tiny.plain_model(family).save(tmp_path / "model", shards=shards))
    assert report.findings == ()
    assert report.checked_tensors == len(Tiny.plain_model(family).tensors)
    assert report.checked_bytes == sum(t.nbytes for t in Tiny.plain_model(family).tensors.values())


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("kind", ["NVFP4", "FP8", "compressed"])
def test_an_unharmed_quantized_model_has_no_findings(kind: str, family: str, tmp_path: Path) -> None:
    tiny = Tiny.compressed(family) if kind == "compressed" else Tiny.modelopt(kind, family)
    assert run(tiny.save(tmp_path / "model")).findings == ()
