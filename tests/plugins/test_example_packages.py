"""Separate packages, built and installed into a fresh virtual environment, found through their entry points.

The environment sees the packages of the one that runs the tests through a `.pth` file, so that nothing is
downloaded; pip builds the examples' wheels with the hatchling that is there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

import builtin_examples as examples
from builtin_examples import UP

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SOUND = EXAMPLES / "vtensors-int8-rows"
BROKEN = {
    name: EXAMPLES / "broken" / name for name in ("claims-everything", "raises-at-import", "returns-rubbish")
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip"),
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling"),
]

READ = """
import json, sys, torch, vtensors
checkpoint = vtensors.open_checkpoint(sys.argv[1])
found = {}
for name in sys.argv[3:]:
    module = checkpoint.modules[name]
    found[name] = checkpoint.read(name).dequantize(torch.float32)
    print(module.convention, module.scheme, tuple(module.shape))
torch.save(found, sys.argv[2])
"""


class Environment:
    """A virtual environment with some of the examples installed."""

    def __init__(self, folder: Path, wheels: list[Path]) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (packages,) = folder.glob("lib/python*/site-packages")
        # addsitedir and not a bare path: it reads the .pth files of editable installations too.
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (packages / "outer.pth").write_text("\n".join(lines) + "\n")
        self.run("-m", "pip", "install", "--no-index", "--no-deps", "--quiet", *map(str, wheels), check=True)

    def run(self, *words: str, check: bool = False, **switches: str) -> subprocess.CompletedProcess[str]:
        """Run Python there, outside of the checkout, without VT_* variables but those given."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("VT_")}
        environ |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **switches}
        paths = environ.get("PYTHONPATH", "").split(os.pathsep)
        environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
        result = subprocess.run(
            [str(self.python), *words],
            capture_output=True,
            text=True,
            env=environ,
            cwd=self.python.parent,
            timeout=300,
        )
        assert not check or result.returncode == 0, result.stdout + result.stderr
        return result

    def vtensors(self, *words: str, **switches: str) -> Any:
        """What the program prints as JSON."""
        result = self.run("-m", "vtensors", *words, "--json", check=True, **switches)
        return json.loads(result.stdout)

    def plugins(self, **switches: str) -> dict[str, dict[str, Any]]:
        """`vtensors plugins --json` by name."""
        return {plugin["name"]: plugin for plugin in self.vtensors("plugins", **switches)["plugins"]}

    def read(
        self, directory: Path, modules: list[str], **switches: str
    ) -> tuple[str, dict[str, torch.Tensor]]:
        """What a process there prints of the modules, and their values."""
        out = directory.parent / f"{directory.name}.pt"
        result = self.run("-c", READ, str(directory), str(out), *modules, check=True, **switches)
        return result.stdout + result.stderr, torch.load(out)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    built = {}
    for name, source in {"int8-rows": SOUND, **BROKEN}.items():
        target = folder / name
        program = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
        result = subprocess.run(
            [*program, "--quiet", "--wheel-dir", str(target), str(source)], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        (built[name],) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Environment:
    return Environment(tmp_path_factory.mktemp("sound") / "venv", [wheels["int8-rows"]])


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Environment:
    return Environment(tmp_path_factory.mktemp("crowded") / "venv", list(wheels.values()))


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint that the example's own tests write."""
    spec = importlib.util.spec_from_file_location("int8_checkpoint", SOUND / "tests" / "int8_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("checkpoints") / "int8"
    directory.mkdir()
    return directory, module.write_checkpoint(directory)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint that the built-in conventions read."""
    directory = tmp_path_factory.mktemp("checkpoints") / "ordinary"
    directory.mkdir()
    return directory, examples.write(directory, {UP: examples.fp8_tensor()}, examples.modelopt("FP8"))


Checkpoint = tuple[Path, dict[str, torch.Tensor]]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def test_the_plugin_is_found_with_its_distribution(sound: Environment) -> None:
    plugin = sound.plugins()["int8-rows"]
    assert plugin["state"] == "active"
    assert (plugin["distribution"], plugin["version"]) == ("vtensors-int8-rows", "0.1.0")
    hooks = ["vtensors_plugin", "vtensors_schemes", "vtensors_conventions", "vtensors_kernels"]
    assert plugin["hooks"] == hooks


def test_an_int8_checkpoint_reads_bit_for_bit(sound: Environment, int8: Checkpoint) -> None:
    directory, expected = int8
    printed, found = sound.read(directory, list(expected))
    assert "int8-rows int8-row (24, 16)" in printed
    assert_equal(found, expected)


def test_inspect_knows_the_new_scheme(sound: Environment, int8: Checkpoint) -> None:
    shown = sound.vtensors("inspect", str(int8[0]))
    (row,) = (row for row in shown["schemes"] if row["scheme"] == "int8-row")
    assert (row["convention"], row["modules"]) == ("int8-rows", len(int8[1]))
    assert shown["unclaimed"] == []


def test_the_packages_own_tests_pass(sound: Environment) -> None:
    result = sound.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(SOUND), str(SOUND / "tests")
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_without_the_plugin_the_checkpoint_is_refused_naming_what_was_seen(
    sound: Environment, int8: Checkpoint
) -> None:
    result = sound.run(
        "-c",
        "import sys, vtensors\n"
        "try: vtensors.open_checkpoint(sys.argv[1])\n"
        "except vtensors.VtensorsError as error: print(type(error).__name__, error)",
        str(int8[0]),
        check=True,
        VT_PLUGINS="-int8-rows",
    )
    assert "DeclarationError" in result.stdout
    assert "'int8-rows'" in result.stdout
    assert "docs/writing-a-plugin.md" in result.stdout


def test_each_broken_plugin_is_named_and_the_others_stay(crowded: Environment) -> None:
    plugins = crowded.plugins()
    for name, word in (("raises-at-import", "a_module_that_is_not_installed"), ("returns-rubbish", "int3")):
        assert plugins[name]["state"] == "quarantined"
        assert plugins[name]["distribution"] == f"vtensors-{name}"
        assert word in plugins[name]["error"]
        assert "Traceback" in plugins[name]["traceback"]
    assert plugins["int8-rows"]["state"] == "active"
    assert {plugin["state"] for plugin in plugins.values() if plugin["builtin"]} == {"active"}


def test_checkpoints_read_as_before_beside_broken_plugins(
    crowded: Environment, ordinary: Checkpoint, int8: Checkpoint
) -> None:
    for directory, expected in (ordinary, int8):
        printed, found = crowded.read(directory, list(expected), VT_PLUGINS="-claims-everything")
        assert_equal(found, expected)
        assert "raises-at-import" in printed
        assert "returns-rubbish" in printed


def test_strict_plugins_refuses_to_go_on_with_a_broken_one(crowded: Environment) -> None:
    result = crowded.run("-m", "vtensors", "plugins", VT_STRICT="plugins")
    assert result.returncode == 2
    assert "raises-at-import" in result.stderr


def test_one_that_claims_everything_is_contained_and_both_claimants_are_named(
    crowded: Environment, ordinary: Checkpoint
) -> None:
    directory, expected = ordinary
    result = crowded.run(
        "-c",
        "import sys, vtensors\n"
        "checkpoint = vtensors.open_checkpoint(sys.argv[1])\n"
        "try: checkpoint.read(sys.argv[2])\n"
        "except vtensors.VtensorsError as error: print(type(error).__name__, error)",
        str(directory),
        UP,
        check=True,
    )
    assert "ClaimError" in result.stdout
    for words in (
        "more than one convention reads this module",
        "'modelopt' (vtensors)",
        "'everything' (vtensors-claims-everything)",
        "VT_PREFER",
        "VT_PLUGINS",
    ):
        assert words in result.stdout
    for switches in ({"VT_PREFER": "vtensors"}, {"VT_PLUGINS": "-claims-everything"}):
        _, found = crowded.read(directory, list(expected), **switches)
        assert_equal(found, expected)


def test_the_program_contains_one_that_claims_everything(crowded: Environment, ordinary: Checkpoint) -> None:
    shown = crowded.run("-m", "vtensors", "inspect", str(ordinary[0]))
    text = shown.stdout + shown.stderr
    assert "vtensors-claims-everything" in text
    assert "Traceback" not in text
