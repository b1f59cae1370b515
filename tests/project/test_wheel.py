"""What is built is what is in the tree: a forgotten .cu, template or bundled checkpoint fails here."""

from __future__ import annotations

import email
import email.message
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from project.source_tree import PACKAGES, REPOSITORY, ROOTS, source_files

# Folders that tools leave behind.
HIDDEN = (".", "__pycache__")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    result = subprocess.run(build, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def wheel_files(built: Path) -> dict[str, bytes]:
    """Name -> bytes of every file in the wheel."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def metadata(wheel_files: dict[str, bytes]) -> email.message.Message:
    """The wheel's METADATA."""
    (name,) = (name for name in wheel_files if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel_files[name])


def test_the_wheel_holds_every_file_of_the_five_packages_and_no_other(
    wheel_files: dict[str, bytes],
) -> None:
    tree = {path.relative_to(REPOSITORY / path.relative_to(REPOSITORY).parts[0]) for path in source_files()}
    packed = {Path(name) for name in wheel_files if ".dist-info/" not in name}
    assert sorted(packed) == sorted(tree)


def test_the_files_in_the_wheel_have_the_bytes_of_the_tree(wheel_files: dict[str, bytes]) -> None:
    different = []
    for path in source_files():
        relative = path.relative_to(REPOSITORY)
        if wheel_files["/".join(relative.parts[1:])] != path.read_bytes():
            different.append(str(relative))
    assert different == []


def test_every_package_is_marked_as_typed(wheel_files: dict[str, bytes]) -> None:
    for package in PACKAGES:
        assert wheel_files[f"{package}/py.typed"] == b""


def test_the_wheel_installs_the_console_script(wheel_files: dict[str, bytes]) -> None:
    (name,) = (name for name in wheel_files if name.endswith(".dist-info/entry_points.txt"))
    assert "vtensors = vtensors.cli:main" in wheel_files[name].decode().splitlines()


def test_the_metadata_names_licence_python_and_extras(metadata: email.message.Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert sorted(metadata.get_all("Provides-Extra", [])) == ["cuda12", "cuda13", "dev", "disassembly"]


def test_the_metadata_caps_nothing_that_an_application_may_choose(metadata: email.message.Message) -> None:
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line for line in required if "<" in line or "==" in line] == []
    assert any(line.startswith("torch>=2.6") for line in required)


def test_the_sdist_holds_sources_tests_docs_and_benchmarks(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {path.relative_to(REPOSITORY).as_posix() for path in source_files()}
    for folder in ("tests", "docs", "benchmarks"):
        files |= {
            path.relative_to(REPOSITORY).as_posix()
            for path in (REPOSITORY / folder).rglob("*")
            if path.is_file()
            and not any(part.startswith(HIDDEN) for part in path.relative_to(REPOSITORY).parts)
        }
    assert files | {"LICENSE", "README.md", "Makefile", "constraints.txt"} <= names
    assert {name.partition("/")[0] for name in files} >= set(ROOTS)
