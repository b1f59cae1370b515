"""CUDA sources of the package, with local includes inlined so that one text holds everything that matters."""

from __future__ import annotations

import re
from importlib import resources

import attrs

from vtensors.errors import RequestError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n?", re.MULTILINE)


@attrs.frozen(kw_only=True)
class Source:
    """One translation unit. name: path below `cuda/`, for messages. text: with local includes inlined."""

    name: str
    text: str


def load_source(name: str) -> Source:
    """The `.cu` file of that path below `vtensors_kernels/cuda`, each local include inlined once.

    Errors: RequestError for a file that the package does not hold, naming who includes it.
    """
    return Source(name=name, text=_inline(name, set(), ""))


def source_names() -> tuple[str, ...]:
    """Every `.cu` file of the package, as `load_source` takes it, sorted."""
    root = resources.files("vtensors_kernels") / "cuda"
    found = []
    for folder in root.iterdir():
        if folder.is_dir():
            found += [f"{folder.name}/{file.name}" for file in folder.iterdir() if file.name.endswith(".cu")]
    return tuple(sorted(found))


def _inline(name: str, seen: set[str], by: str) -> str:
    path = resources.files("vtensors_kernels") / "cuda" / name
    if not path.is_file():
        raise RequestError(
            "no such CUDA source in the package", file=name, seen=f"included by {by}" if by else ""
        )
    seen.add(name)
    text = _ONCE.sub("", path.read_text())

    def replace(found: re.Match[str]) -> str:
        wanted = found[1]
        if wanted in seen:
            return f"// {wanted} is above"
        return f'#line 1 "{wanted}"\n{_inline(wanted, seen, name)}\n#line {_line(text, found.end()) + 1} "{name}"'

    return _INCLUDE.sub(replace, text)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
