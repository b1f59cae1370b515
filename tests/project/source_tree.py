"""The five source roots of the project, in the order of the import direction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# Each may import those before it, never those after it.
PACKAGES = ("vtensors", "vtensors_formats", "vtensors_kernels", "vtensors_plugins", "vtensors_engine")
ROOTS = ("core", "formats", "kernels", "plugins", "engine")


def package_folders(repository: Path = REPOSITORY) -> list[Path]:
    """The folders of the five packages, such as core/vtensors."""
    return [repository / root / package for root, package in zip(ROOTS, PACKAGES, strict=True)]


def files_under(folder: Path) -> Iterator[Path]:
    """Every file below the folder that is not made by the interpreter, sorted."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield path


def source_files(repository: Path = REPOSITORY) -> list[Path]:
    """Every file of the five packages: Python, CUDA, templates, bundled checkpoints, `py.typed`."""
    return [path for folder in package_folders(repository) for path in files_under(folder)]
