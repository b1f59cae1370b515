"""The parent's side of the process that renders chat templates; see `chat_worker` for its bounds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import IO, Any

import attrs

from vtensors.errors import RequestError

MAX_SOURCE = 1_000_000
# Starting it takes about 0.05 s, rendering a long conversation about a millisecond.
RENDER_SECONDS = 5.0
START_SECONDS = 30.0
# Of an answer: the characters that the worker allows, each at most six bytes of JSON.
_MAX_ANSWER = 64_000_000


class TemplateRefusedError(Exception):
    """The template broke a bound, reached for what it must not, or ended the process."""


@attrs.define(eq=False)
class ChatProcess:
    """One process, started at the first use and again after it was stopped; calls wait for each other."""

    render_seconds: float = RENDER_SECONDS
    _process: subprocess.Popen[bytes] | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)
    _finalizer: Any = None

    def check(self, source: str, *, file: str) -> None:
        """Compile the template. Errors as `render` has them."""
        self._ask(source, None, file)

    def render(self, source: str, values: Mapping[str, object], *, file: str) -> str:
        """The text of the template under these variables.

        Raises RequestError for a syntax error, for what the template raises and for values that are not JSON;
        TemplateRefusedError with the reason for a template that must not be used.
        """
        return self._ask(source, values, file)

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _ask(self, source: str, values: Mapping[str, object] | None, file: str) -> str:
        if len(source) > MAX_SOURCE:
            raise TemplateRefusedError(f"it is longer than {MAX_SOURCE} characters")
        try:
            request = json.dumps({"source": source, "values": values}).encode()
        except (TypeError, ValueError, RecursionError) as cause:
            raise RequestError(
                f"messages or variables are not JSON values: {cause}",
                accepted="strings, numbers, true, false, null, lists and dictionaries of these",
                fix="convert them, as json.dumps must take them",
            ) from cause
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                    self._exchange(b'{"source": "", "values": null}', START_SECONDS)
                found = self._exchange(request, self.render_seconds)
            except BaseException:
                # An interrupt too: the answer that is still to come would be taken for that of the next request.
                self.stop()
                raise
        if "refused" in found:
            raise TemplateRefusedError(found["refused"])
        if "error" not in found:
            return str(found["text"])
        if found["line"] is not None:
            raise RequestError(
                f"the chat template cannot be read: {found['error']}",
                file=file,
                seen=f"line {found['line']}",
                accepted="a Jinja template",
                fix="put the model's own chat template beside its weights",
            )
        raise RequestError(
            f"the chat template does not accept the conversation: {found['error']}",
            file=file,
            accepted="messages in the order and with the fields that the template asks for",
            fix="see the template for the roles and contents it accepts",
        )

    def _exchange(self, request: bytes, allowed: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise TemplateRefusedError("its process has no pipes")
        end = time.monotonic() + allowed
        try:
            process.stdin.write(len(request).to_bytes(8, "little") + request)
            process.stdin.flush()
        except OSError as cause:
            raise TemplateRefusedError("the process that renders it has ended") from cause
        size = int.from_bytes(_read(process.stdout, 8, end, allowed), "little")
        if size > _MAX_ANSWER:
            raise TemplateRefusedError(f"it writes more than {_MAX_ANSWER} bytes")
        answer: dict[str, Any] = json.loads(_read(process.stdout, size, end, allowed))
        return answer

    def _start(self) -> None:
        # The parent's own path and clock, and nothing else of its environment: tokens and keys stay here.
        environment = {"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
        if "TZ" in os.environ:
            environment["TZ"] = os.environ["TZ"]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vtensors_engine.chat_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as cause:
            raise TemplateRefusedError(f"no process can be started for it: {cause}") from cause
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)


def _read(stream: IO[bytes], size: int, end: float, allowed: float) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        left = end - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            raise TemplateRefusedError(f"it takes more than {allowed:g} s")
        part = os.read(stream.fileno(), min(size, 1 << 20))
        if not part:
            raise TemplateRefusedError("the process that renders it ended: out of memory or time")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait()
