"""`vtensors verify`: exit status, JSON, torch-free structure, and the page that documents its codes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from fake_hub import COMMIT, FakeHub, serving
from tiny_checkpoints import Tiny
from verify_cases import CASES
from verify_tools import DOWN
from vtensors.cli import main
from vtensors.verification import markdown_table

ROOT = Path(__file__).parents[2]


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    printed = capsys.readouterr()
    assert printed.err == ""
    return dict(json.loads(printed.out))


def test_a_clean_checkpoint_exits_with_0_and_counts_what_was_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Tiny.modelopt()
    assert main(["verify", str(tiny.save(tmp_path / "model")), "--json"]) == 0
    assert _json(capsys) == {
        "findings": [],
        "checked_tensors": len(tiny.tensors),
        "checked_bytes": sum(tensor.nbytes for tensor in tiny.tensors.values()),
        "values": True,
    }


@pytest.mark.parametrize("code", ["fused-scales-differ", "truncated-file", "damaged-header", "missing-file"])
def test_findings_of_any_severity_exit_with_1(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(CASES[code].make(tmp_path / "model")), "--json"]) == 1
    findings = _json(capsys)["findings"]
    assert isinstance(findings, list)
    assert code in {finding["code"] for finding in findings}
    assert set(findings[0]) == {"severity", "code", "tensor", "seen", "expected", "fix"}


def test_errors_come_before_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CASES["stray-file"].make(tmp_path / "model")
    (folder / "config.json").write_text("{")
    assert main(["verify", str(folder), "--json"]) == 1
    findings = _json(capsys)["findings"]
    assert isinstance(findings, list)
    severities = [finding["severity"] for finding in findings]
    assert severities == sorted(severities)
    assert set(severities) == {"error", "warning"}


def test_what_is_no_checkpoint_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for source in (tmp_path / "absent", tmp_path, tmp_path / "notes.txt"):
        assert main(["verify", str(source)]) == 2
        assert "error: " in capsys.readouterr().err


def test_hash_without_any_hash_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(Tiny.plain_model().save(tmp_path / "model")), "--hash"]) == 2
    assert "no file here has a hash" in capsys.readouterr().err


def test_a_folder_downloaded_with_local_dir_is_held_against_its_metadata(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Tiny.plain_model().save(tmp_path / "model")
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / "config.json.metadata").write_text(f"{COMMIT}\n{'a' * 40}\n1.0\n")
    assert main(["verify", str(folder), "--hash", "--json"]) == 1
    findings = _json(capsys)["findings"]
    assert isinstance(findings, list)
    codes = {finding["tensor"]: finding["code"] for finding in findings}
    assert codes == {"config.json": "content-differs", "model.safetensors": "unknown-hash"}


def test_the_text_names_finding_value_and_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(CASES["scale-negative"].make(tmp_path / "model"))]) == 1
    out = capsys.readouterr().out
    assert f"error    scale-negative: {DOWN}.weight_scale" in out
    assert "expected finite and above zero" in out
    assert "1 error, 0 warnings; 63 tensors" in out


def test_many_findings_of_one_code_are_cut_short_in_text_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Tiny.modelopt("NVFP4", "qwen3_5_moe")
    for name in [name for name in tiny.tensors if name.endswith("input_scale")]:
        del tiny.tensors[name]
    folder = str(tiny.save(tmp_path / "model"))
    assert main(["verify", folder]) == 1
    out = capsys.readouterr().out
    assert out.count("missing-activation-scale:") == 20
    assert "more of missing-activation-scale" in out
    assert main(["verify", folder, "--json"]) == 1
    findings = _json(capsys)["findings"]
    assert isinstance(findings, list)
    assert len(findings) > 40


def test_against_prints_figures_per_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = Tiny.plain_model().save(tmp_path / "reference")
    folder = Tiny.modelopt().save(tmp_path / "model")
    assert main(["verify", str(folder), "--against", str(reference)]) == 0
    out = capsys.readouterr().out
    assert "as good as nvfp4" in out
    assert "exact" in out
    assert main(["verify", str(folder), "--against", str(reference), "--json"]) == 0
    rows = _json(capsys)["comparisons"]
    assert isinstance(rows, list)
    worst = rows[0]
    assert set(worst) == {
        "module",
        "reference",
        "scheme",
        "cosine",
        "snr_db",
        "max_abs_error",
        "reach_db",
        "worst_blocks",
        "verdict",
    }
    assert worst["worst_blocks"][0]["rows"][0] == 0


def test_a_reference_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Tiny.plain_model().save(tmp_path / "model")
    bad = CASES["damaged-header"].make(tmp_path / "reference")
    assert main(["verify", str(folder), "--against", str(bad)]) == 2
    assert "the reference cannot be read" in capsys.readouterr().err


STRUCTURE = """
import sys
from vtensors.cli import main
status = main(["verify", sys.argv[1], "--structure-only", "--json"])
print("heavy:", *(name for name in ("torch", "cupy") if name in sys.modules), file=sys.stderr)
sys.exit(status)
"""


def test_structure_only_imports_no_torch_and_looks_at_no_value(tmp_path: Path) -> None:
    tiny = Tiny.modelopt()
    tiny.tensors[f"{DOWN}.weight_scale_2"] = torch.tensor(float("nan"))
    folder = tiny.save(tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VT_")}
    done = subprocess.run(
        [sys.executable, "-c", STRUCTURE, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "heavy:"
    assert json.loads(done.stdout) == {
        "findings": [],
        "checked_tensors": len(tiny.tensors),
        "checked_bytes": 0,
        "values": False,
    }


def test_without_torch_only_the_structure_is_looked_at_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def without_torch(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_torch)
    folder = str(Tiny.plain_model().save(tmp_path / "model"))
    assert main(["verify", folder]) == 0
    printed = capsys.readouterr()
    assert "torch is not installed: values are not looked at" in printed.err
    assert "(headers only)" in printed.out
    assert main(["verify", folder, "--against", folder]) == 2
    assert "needs torch" in capsys.readouterr().err


def test_a_repository_that_is_not_here_is_checked_by_its_headers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Tiny.plain_model()
    del tiny.tensors["model.norm.weight"]
    with serving(FakeHub(root=tiny.save(tmp_path / "model"))) as hub:
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        # Where older versions keep the template.
        older = "huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE"
        monkeypatch.setattr(older, template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        assert main(["verify", "org/name", "--structure-only", "--json"]) == 1
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert [finding["code"] for finding in findings] == ["missing-weight"]
        assert main(["verify", "org/name"]) == 2
        assert "--structure-only" in capsys.readouterr().err


def test_a_lock_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Tiny.plain_model().save(tmp_path / "first")
    second = Tiny.modelopt().save(tmp_path / "second")
    lock = tmp_path / "lock.json"
    assert main(["lock", str(first), "--output", str(lock)]) == 0
    capsys.readouterr()
    assert main(["verify", str(first), "--lock", str(lock)]) == 0
    assert main(["verify", str(second), "--lock", str(lock)]) == 2


def test_the_page_has_every_code_with_its_words() -> None:
    page = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    assert markdown_table() in page
    bars = re.compile(r"(?<!\\)\|")
    assert {len(bars.findall(line)) for line in markdown_table().splitlines()} == {6}


def test_a_configuration_that_cannot_be_read_is_one_finding_and_blames_no_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(__file__).parents[1] / "data" / "qwen3-modelopt-nvfp4-kvfp8"
    for name in ("hf_quant_config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path / name)
    (tmp_path / "config.json").write_bytes(b'{"architectures": ["\xff"]}')
    assert main(["verify", str(tmp_path), "--structure-only", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(found["code"], found["tensor"]) for found in findings] == [("damaged-config", "config.json")]
