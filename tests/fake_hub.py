"""A server on 127.0.0.1 that speaks the Hub's paths for one repository, and counts what it sends.

Import as `from fake_hub import FakeHub, serving` (tests/ is on pytest's pythonpath).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import attrs

COMMIT = "d" * 40


@attrs.define
class FakeHub:
    """Serves the files of `root` as the repository org/name at `COMMIT`, which is `main`.

    ranges: False ignores Range headers, as some mirrors do. status: answer to every file that exists.
    sent: bytes of all bodies so far. requests: (method, path, Range header) so far.
    """

    root: Path
    ranges: bool = True
    status: int = 200
    sent: int = 0
    requests: list[tuple[str, str, str | None]] = attrs.field(factory=list)
    endpoint: str = ""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the server on a free port; `hub.endpoint` is its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            wanted = self.headers.get("range")
            hub.requests.append((self.command, self.path, wanted))
            listing = re.fullmatch(r"/api/models/org/name(/revision/(?P<revision>[^?]+))?(\?.*)?", self.path)
            tree = re.match(r"/api/models/org/name/tree/", self.path)
            file = re.fullmatch(rf"/org/name/resolve/(main|{COMMIT})/(?P<name>[^/]+)", self.path)
            if listing or tree:
                if listing and listing["revision"] not in (None, "main", COMMIT):
                    self.refuse(404, "RevisionNotFound")
                    return
                names = sorted(path.name for path in hub.root.iterdir())
                record: object = {
                    "id": "org/name",
                    "sha": COMMIT,
                    "siblings": [{"rfilename": name} for name in names],
                }
                if tree:
                    record = [
                        {
                            "type": "file",
                            "path": name,
                            "size": (hub.root / name).stat().st_size,
                            "oid": "e" * 40,
                        }
                        for name in names
                    ]
                self.send(200, json.dumps(record).encode(), {"Content-Type": "application/json"}, body=body)
            elif file and (hub.root / file["name"]).is_file():
                if hub.status != 200:
                    self.refuse(hub.status, "None")
                    return
                self.send_file(hub.root / file["name"], wanted if hub.ranges else None, body=body)
            else:
                self.refuse(404, "EntryNotFound" if "/name/" in self.path else "RepoNotFound")

        def refuse(self, status: int, code: str) -> None:
            self.send(status, b"", {"X-Error-Code": code}, body=True)

        def send_file(self, path: Path, wanted: str | None, *, body: bool) -> None:
            size = path.stat().st_size
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{path.name}-{size}"', "Accept-Ranges": "bytes"}
            begin, end, status = 0, size, 200
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted or "")
            if match:
                begin, end, status = int(match[1]), min(int(match[2]) + 1, size), 206
                if begin >= size:
                    self.send(416, b"", {**headers, "Content-Range": f"bytes */{size}"}, body=body)
                    return
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            with path.open("rb") as stream:
                stream.seek(begin)
                data = stream.read(end - begin) if body else b""
            self.send(status, data, {**headers, "Content-Length": str(end - begin)}, body=body)

        def send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            view = memoryview(data if body else b"")
            try:
                for at in range(0, len(view), 65_536):
                    hub.sent += self.wfile.write(view[at : at + 65_536])
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    return Handler
