"""Rewrites what a command of `vtensors` prints: two pages of docs/, and the part of a third between its markers.

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
END = "<!-- end -->"


def printed(arguments: tuple[str, ...]) -> str:
    """What `vtensors` prints, with no switch set. Raises CalledProcessError where it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VT_")}
    command = [sys.executable, "-m", "vtensors", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, encoding="utf-8")
    return done.stdout


def table_of(page: str, heading: str) -> str:
    """The table of a section, and what follows it there."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return section[section.index("\n|") :].strip()


def with_part(page: str, source: str, heading: str, table: str) -> str:
    """The page with the table between its markers."""
    begin = f"<!-- from {source}: {heading} -->"
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{table}\n{END}{rest.partition(END)[2]}"


def wanted_pages(docs: Path = DOCS) -> dict[str, str]:
    """Every generated page as it should be, by name."""
    pages = {name: printed(command) for name, command in PAGES.items()}
    for name, (source, heading) in PARTS.items():
        page = (docs / name).read_text(encoding="utf-8")
        pages[name] = with_part(page, source, heading, table_of(pages[source], heading))
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
