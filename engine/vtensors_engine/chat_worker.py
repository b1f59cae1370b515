"""The process that renders chat templates: `python -m vtensors_engine.chat_worker`, bounded by the kernel.

Requests come on stdin and answers go to stdout, each eight length bytes (little endian) and JSON:
`{"source": str, "values": object | null}` -> `{"text": str}`, `{"error": str, "line": int | null}` or
`{"refused": str}`. Without values the template is only compiled.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from typing import Any

import jinja2
import jinja2.exceptions

from vtensors_engine.chat_environment import new_environment

MEMORY_BYTES = 512 << 20
CPU_SECONDS = 10
# Some two million tokens of text.
MAX_CHARACTERS = 8_000_000


def main() -> None:
    """Answer requests until stdin ends."""
    limit_process()
    environment = new_environment()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while len(head := stdin.read(8)) == 8:
        request = json.loads(stdin.read(int.from_bytes(head, "little")))
        allow_cpu_seconds(CPU_SECONDS)
        blob = json.dumps(answer(environment, request["source"], request["values"])).encode()
        stdout.write(len(blob).to_bytes(8, "little") + blob)
        stdout.flush()


def answer(environment: jinja2.Environment, source: str, values: dict[str, Any] | None) -> dict[str, Any]:
    """What the template gives: text, an error of its own, or why it is refused."""
    try:
        template = environment.from_string(source)
        text = template.render(values) if values is not None else ""
    except jinja2.TemplateSyntaxError as problem:
        return {"error": problem.message or "", "line": problem.lineno}
    except jinja2.exceptions.SecurityError as problem:
        return {"refused": f"it is unsafe: {problem}"}
    except (MemoryError, RecursionError, OverflowError) as problem:
        return {"refused": f"it asks for too much: {type(problem).__name__} {problem}".strip()}
    except Exception as problem:  # a template can raise anything that an expression of Python can
        return {"error": str(problem) or type(problem).__name__, "line": None}
    if len(text) > MAX_CHARACTERS:
        return {"refused": f"it writes more than {MAX_CHARACTERS} characters"}
    return {"text": text}


def limit_process() -> None:
    """Bound memory, and allow neither files, core dumps nor further descriptors."""
    for which, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # a system without that limit still has the parent's clock
            resource.setrlimit(which, (most, most))


def allow_cpu_seconds(seconds: int) -> None:
    """The kernel ends the process once it has computed that much longer."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + seconds, hard))


if __name__ == "__main__":
    main()
