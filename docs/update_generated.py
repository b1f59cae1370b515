"""Rewrites what a command of `vtensors` prints: two pages of docs/, and parts of others between their markers.

python docs/update_generated.py           rewrites them
python docs/update_generated.py --check   exits 1 if that would change one
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
# Page -> the subcommand that prints it. Only built-in plugins count, whatever else is installed.
PAGES = {
    "conventions.md": ("conventions", "--markdown"),
    "environment.md": ("env", "--markdown"),
}
# Page -> the printed page and the section of it whose table it repeats.
PARTS = {"python-api.md": ("conventions.md", "Activations")}
# Page -> a command whose output's beginning it shows, and how many blocks (paragraphs) of it.
EXAMPLES = {
    "explain.md": (
        ("explain", "tests/data/llama-llmcompressor-nvfp4a16", "--assume", "sm_121a"),
        12,
    ),
}
END = "<!-- end -->"


def printed(arguments: tuple[str, ...]) -> str:
    """What `vtensors` prints in the repository, with no switch set, 100 columns wide.

    Raises CalledProcessError where it fails; exit status 1 is no failure, but findings.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VT_")}
    environment["COLUMNS"] = "100"
    done = subprocess.run(
        [sys.executable, "-m", "vtensors", *arguments],
        env=environment,
        cwd=DOCS.parent,
        stdout=subprocess.PIPE,
        check=False,
        encoding="utf-8",
    )
    if done.returncode not in (0, 1):
        done.check_returncode()
    return done.stdout


def table_of(page: str, heading: str) -> str:
    """The table of a section, and what follows it there."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return section[section.index("\n|") :].strip()


def with_part(page: str, begin: str, text: str) -> str:
    """The page with the text between the marker `begin` and the next END."""
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{text}\n{END}{rest.partition(END)[2]}"


def example_of(command: tuple[str, ...], blocks: int) -> str:
    """The first blocks that a command prints, as a console shows them."""
    shown = printed(command).rstrip().split("\n\n")
    more = ["..."] if len(shown) > blocks else []
    return "\n\n".join((f"```console\n$ vtensors {' '.join(command)}", *shown[:blocks], *more)) + "\n```"


def wanted_pages(docs: Path = DOCS) -> dict[str, str]:
    """Every generated page as it should be, by name."""
    pages = {name: printed(command) for name, command in PAGES.items()}
    for name, (source, heading) in PARTS.items():
        page = (docs / name).read_text(encoding="utf-8")
        pages[name] = with_part(page, f"<!-- from {source}: {heading} -->", table_of(pages[source], heading))
    for name, (command, blocks) in EXAMPLES.items():
        page = (docs / name).read_text(encoding="utf-8")
        begin = f"<!-- from: vtensors {' '.join(command)} -->"
        pages[name] = with_part(page, begin, example_of(command, blocks))
    return pages


def main(arguments: list[str], docs: Path = DOCS) -> int:
    """Rewrite the pages, or with --check compare only; returns the exit status."""
    stale = 0
    for name, wanted in wanted_pages(docs).items():
        page = docs / name
        if page.is_file() and page.read_text(encoding="utf-8") == wanted:
            continue
        if arguments == ["--check"]:
            print(f"docs/{name} is out of date: run python docs/update_generated.py", file=sys.stderr)
            stale = 1
        else:
            page.write_text(wanted, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
