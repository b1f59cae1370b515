"""Published repositories: full-size phantoms of two of them, and the configurations of many."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vtensors.configs import ConfigFiles
from vtensors.declaring import read_declarations
from vtensors.manager import default_plugins

INSPECT = (
    "import sys; from vtensors.cli import main; code = main(sys.argv[1:]); "
    "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr); sys.exit(code)"
)


@pytest.fixture(scope="module")
def phantoms(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sparse full-size checkpoints, by short name."""
    root = tmp_path_factory.mktemp("phantoms")
    made = {}
    for short, repo in (("27b", "nvidia/Qwen3.6-27B-NVFP4"), ("35b", "nvidia/Qwen3.6-35B-A3B-NVFP4")):
        made[short] = root / short
        subprocess.run(
            [sys.executable, str(shared / "tools" / "phantom.py"), repo, str(made[short])],
            check=True,
            capture_output=True,
        )
    return made


def _inspect(path: Path) -> tuple[dict, str, float, int]:
    """Report, stderr, CPU seconds and peak bytes of a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", INSPECT, "inspect", str(path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), done.stderr, seconds, after.ru_maxrss * 1024


def test_the_27b_is_explained_from_its_headers(phantoms: dict[str, Path]) -> None:
    report, stderr, seconds, _ = _inspect(phantoms["27b"])
    counts = {(row["scheme"], row["declared"]): row["modules"] for row in report["schemes"]}
    assert counts["nvfp4", "16bit"] == 193
    assert counts["fp8-tensor", "fp8-static"] == 208
    assert set(counts) == {("nvfp4", "16bit"), ("fp8-tensor", "fp8-static"), ("bf16", "16bit")}
    waived = {row["reason"].split(":")[0]: row["tensors"] for row in report["waived"]}
    assert waived["vision tower"] == 333
    assert waived["multi-token prediction"] == 15
    assert report["unclaimed"] == [] == report["problems"]
    assert report["total_bytes"] == 21_921_428_072
    assert report["architecture"] == "Qwen3_5ForConditionalGeneration"
    assert stderr.split()[-2:] == ["False", "False"]
    assert seconds < 0.7


def test_the_35b_is_explained_and_its_contradiction_reported(phantoms: dict[str, Path]) -> None:
    report, _, seconds, _ = _inspect(phantoms["35b"])
    assert report["tensors"] == 124_468
    assert report["unclaimed"] == [] == report["problems"]
    groups = [row for row in report["conflicts"] if "config_groups" in row["where"]]
    assert len(groups) == 1
    assert "fp4" in groups[0]["says"]
    assert "W4A16_NVFP4" in groups[0]["chosen"]
    assert any("KV cache" in row["where"] for row in report["conflicts"])
    assert seconds < 8  # 4 s on an idle machine; this one may be shared


@pytest.mark.parametrize(("short", "limit"), [("27b", 150e6), ("35b", 500e6)])
def test_inspect_stays_small(phantoms: dict[str, Path], short: str, limit: float) -> None:
    script = (
        "import re, sys; from vtensors.cli import main; main(sys.argv[1:]);"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", str(phantoms[short]), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr.split()[-1]) * 1024 < limit


def test_importing_takes_less_than_a_third_of_a_second() -> None:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import vtensors"], check=True)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.3


def test_every_published_configuration_is_understood(shared: Path) -> None:
    pairs: dict[str, dict[str, dict]] = {}
    for file in sorted((shared / "configs").iterdir()):
        kind = "hf_quant" if file.name.endswith("_hf_quant_config.json") else "config"
        base = file.name.removesuffix("_config.json").removesuffix("_hf_quant")
        pairs.setdefault(base, {})[kind] = json.loads(file.read_text())
    assert sum(len(pair) for pair in pairs.values()) == 64
    for base, pair in pairs.items():
        configs = ConfigFiles(config=pair.get("config"), hf_quant=pair.get("hf_quant"))
        claimants, warnings = read_declarations(configs, default_plugins(), base)
        assert not warnings
        assert any(c.declaration is not None and c.declaration.summary for c in claimants), base
