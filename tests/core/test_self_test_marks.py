"""Marks of self-tests: what a dead process left condemns, what a living one holds does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vtensors.self_test_marks import OLDEST_SECONDS, Condemned, SelfTestMark

KEY = '{"self_tests_of": "linear_fast"}'
# Marks a test as pending and waits, or dies in it.
OWNER = """
import os, sys
from pathlib import Path
from vtensors.self_test_marks import SelfTestMark
mark = SelfTestMark(path=Path(sys.argv[1]), key=sys.argv[2])
assert mark.take() is None
mark.pending()
if sys.argv[3] == "condemn":
    mark.condemn("did not end in time")
if sys.argv[3] == "compile":
    mark.lift()
if sys.argv[3] == "wait":
    print("begun", flush=True)
    sys.stdin.read()
    mark.release()
os._exit(9)
"""


def mark_at(path: Path, key: str = KEY) -> SelfTestMark:
    return SelfTestMark(path=path, key=key)


def run_owner(path: Path, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", OWNER, str(path), KEY, how], check=False, timeout=60)
    assert done.returncode == 9


def test_a_test_that_ends_leaves_nothing_against_its_kernel(tmp_path: Path) -> None:
    for _ in range(2):
        mark = mark_at(tmp_path / "a.json")
        assert mark.take() is None
        mark.pending()
        mark.release()
    assert (tmp_path / "a.json").read_text() == ""


def test_a_mark_of_a_process_that_died_in_its_test_condemns_until_it_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "marks" / "a.json"
    run_owner(path, "die")
    for _ in range(2):
        found = mark_at(path).take()
        assert found is not None
        assert found.why.startswith("never ended (")
        assert "its process is gone" in found.why
        assert not found.own
    path.unlink()
    assert mark_at(path).take() is None


def test_a_process_that_died_while_it_compiled_condemns_nothing(tmp_path: Path) -> None:
    run_owner(tmp_path / "a.json", "compile")
    assert mark_at(tmp_path / "a.json").take() is None


def test_what_a_test_was_condemned_for_is_told_to_later_processes(tmp_path: Path) -> None:
    run_owner(tmp_path / "a.json", "condemn")
    found = mark_at(tmp_path / "a.json").take()
    assert found is not None
    assert found.why.startswith("did not end in time (")
    assert not found.own


def test_the_process_that_condemned_a_kernel_knows_that_it_did(tmp_path: Path) -> None:
    mark = mark_at(tmp_path / "a.json")
    mark.take()
    assert mark.condemn("did not end in time")
    found = mark_at(tmp_path / "a.json").take()
    assert isinstance(found, Condemned)
    assert found.own


def test_a_mark_that_another_process_holds_condemns_nothing_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path), KEY, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"begun\n"
        written = path.read_text()
        other = mark_at(path)
        assert other.take() is None
        other.pending()
        assert not other.condemn("did not end in time")
        other.release()
        assert path.read_text() == written != ""
        late = SelfTestMark(path=path, key=KEY, now=lambda: 9e9 + OLDEST_SECONDS)
        found = late.take()
        assert found is not None
        assert "another process still runs it" in found.why
        owner.communicate(b"")
    assert mark_at(path).take() is None


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"layout": 1}', "cut", "other key"])
def test_a_damaged_mark_is_none(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.json"
    run_owner(path, "die")
    text = path.read_text()
    match damage:
        case "cut":
            path.write_text(text[:-9])
        case "other key":
            assert mark_at(path, "{}").take() is None
            return
        case _:
            path.write_text(damage)
    assert mark_at(path).take() is None


def test_where_nothing_can_be_written_there_are_no_marks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file in its place")
    mark = mark_at(tmp_path / "file" / "a.json")
    assert mark.take() is None
    mark.pending()
    assert not mark.condemn("did not end in time")


def test_where_files_cannot_be_locked_there_are_no_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_owner(tmp_path / "a.json", "die")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert mark_at(tmp_path / "a.json").take() is None


def test_where_marks_cannot_be_written_those_that_are_there_are_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    run_owner(path, "condemn")
    opened = os.open

    def read_only(name: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(name)
        return opened(name, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    written = path.read_text()
    found = mark_at(path).take()
    assert found is not None
    assert found.why.startswith("did not end in time (")
    path.write_text("")
    mark = mark_at(path)
    assert mark.take() is None
    mark.pending()
    assert not mark.condemn("did not end in time")
    assert path.read_text() == "" != written
    assert mark_at(tmp_path / "missing.json").take() is None


def test_a_child_that_was_forked_in_a_test_does_not_keep_its_mark(tmp_path: Path) -> None:
    mark = mark_at(tmp_path / "a.json")
    assert mark.take() is None
    mark.pending()
    hold, let_go = os.pipe()
    child = os.fork()
    if not child:
        os.close(let_go)
        os.read(hold, 1)
        os._exit(0)
    try:
        mark.release()
        later = mark_at(tmp_path / "a.json")
        assert later.take() is None
        assert later.condemn("did not end in time")
    finally:
        os.close(let_go)
        os.close(hold)
        os.waitpid(child, 0)


def test_what_a_given_up_thread_still_writes_does_not_lift_a_condemnation(tmp_path: Path) -> None:
    for attempt in range(20):
        mark = mark_at(tmp_path / f"{attempt}.json")
        assert mark.take() is None
        problems: list[BaseException] = []
        over = threading.Event()

        def compiles(
            mark: SelfTestMark = mark,
            problems: list[BaseException] = problems,
            over: threading.Event = over,
        ) -> None:
            try:
                while not over.is_set():
                    mark.lift()
                    mark.pending()
            except BaseException as problem:
                problems.append(problem)

        thread = threading.Thread(target=compiles)
        thread.start()
        assert mark.condemn("did not end in time")
        over.set()
        thread.join()
        assert problems == []
        found = mark_at(mark.path).take()
        assert found is not None
        assert found.why.startswith("did not end in time")
