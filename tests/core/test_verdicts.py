"""Verdicts: a self-test runs once per kernel, request, build, card and driver; only passes are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from fake_plugins import candidate, module
from kernel_specs import failing, kernel, request
from vtensors.errors import RequestError
from vtensors.kernel_binding import bind_plan
from vtensors.kernel_entries import DeviceIdentity, EntryFolder, entry_key
from vtensors.manager import Plugins
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import plan_kernels
from vtensors.verdicts import Verdicts, kernel_versions

CARD = DeviceIdentity(name="NVIDIA H200", uuid="GPU-1", driver="580.159.04")


def counted(seen: list[KernelRequest], build: str = "NVRTC 13.0 sm_90a 3fa4b2") -> KernelSpec:
    return kernel("linear_fast", probe=seen.append, fingerprint=lambda asked: build)


def test_a_pass_is_remembered_and_kept_for_the_next_process(tmp_path: Path) -> None:
    seen: list[KernelRequest] = []
    first = Verdicts(folder=tmp_path, device=CARD)
    assert [first.failure(counted(seen), request()) for _ in range(3)] == [None] * 3
    assert len(seen) == 1
    assert len(list((tmp_path / "verdicts").iterdir())) == 1
    assert Verdicts(folder=tmp_path, device=CARD).failure(counted(seen), request()) is None
    assert len(seen) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda v: attrs.evolve(v, device=attrs.evolve(CARD, uuid="GPU-2")),
        lambda v: attrs.evolve(v, device=attrs.evolve(CARD, driver="590.1")),
        lambda v: attrs.evolve(v, versions={"linear_fast": "fast-dist 1.3"}),
        lambda v: attrs.evolve(v, device=None),
        lambda v: attrs.evolve(v, folder=None),
    ],
    ids=["card", "driver", "distribution", "no card", "no folder"],
)
def test_another_card_driver_or_distribution_is_tested_anew(
    tmp_path: Path, change: Callable[[Verdicts], Verdicts]
) -> None:
    seen: list[KernelRequest] = []
    verdicts = Verdicts(folder=tmp_path, device=CARD, versions={"linear_fast": "fast-dist 1.2"})
    verdicts.failure(counted(seen), request())
    change(verdicts).failure(counted(seen), request())
    assert len(seen) == 2


@pytest.mark.parametrize(
    "other",
    [
        request(tokens=(1, 32)),
        request("linear_add"),
        request(scheme="fp8-row"),
        request(traits=frozenset({"bias"})),
        attrs.evolve(request(), dtype="float16"),
        attrs.evolve(request(), shape=(97, 64)),
    ],
)
def test_another_request_is_tested_anew(tmp_path: Path, other: KernelRequest) -> None:
    seen: list[KernelRequest] = []
    Verdicts(folder=tmp_path, device=CARD).failure(counted(seen), request())
    Verdicts(folder=tmp_path, device=CARD).failure(counted(seen), other)
    assert seen == [request(), other]


def test_another_build_is_tested_anew_and_the_index_of_the_card_does_not_matter(tmp_path: Path) -> None:
    seen: list[KernelRequest] = []
    Verdicts(folder=tmp_path, device=CARD).failure(counted(seen), request())
    Verdicts(folder=tmp_path, device=CARD).failure(counted(seen), request(device="cuda:1"))
    assert len(seen) == 1
    Verdicts(folder=tmp_path, device=CARD).failure(counted(seen, "NVRTC 13.2 sm_90a 3fa4b2"), request())
    assert len(seen) == 2


def test_the_key_lists_traits_in_one_order() -> None:
    traits = ("bias", "group32", "pre_scale", "row_scale", "shared")
    key = entry_key(kernel("k"), request(traits=frozenset(traits)), CARD, version="1", fingerprint="f")
    assert json.loads(key)["request"]["traits"] == list(traits)


def test_a_failure_is_told_with_the_build_and_kept_in_memory_only(tmp_path: Path) -> None:
    runs: list[KernelRequest] = []

    def probe(asked: KernelRequest) -> None:
        runs.append(asked)
        raise RuntimeError("relative error 0.7\n  accepted: 0.004")

    broken = kernel("linear_fast", probe=probe)
    verdicts = Verdicts(folder=tmp_path, device=CARD)
    reasons = {verdicts.failure(broken, request()) for _ in range(3)}
    assert reasons == {
        "failed its self-test (NVRTC 13.0 sm_90a 3fa4b2): RuntimeError: relative error 0.7; accepted: 0.004"
    }
    assert len(runs) == 1
    assert not (tmp_path / "verdicts").exists()
    Verdicts(folder=tmp_path, device=CARD).failure(broken, request())
    assert len(runs) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"layout": 1}', "cut", "flipped", "other key"])
def test_a_damaged_entry_is_no_verdict_and_is_written_anew(tmp_path: Path, damage: bytes | str) -> None:
    seen: list[KernelRequest] = []
    Verdicts(folder=tmp_path, device=CARD).failure(counted(seen), request())
    (path,) = (tmp_path / "verdicts").iterdir()
    whole = path.read_bytes()
    match damage:
        case bytes():
            path.write_bytes(damage)
        case "cut":
            path.write_bytes(whole[:-9])
        case "flipped":
            path.write_bytes(whole.replace(b"true", b"null"))
        case _:
            path.write_bytes(json.dumps(json.loads(whole) | {"key": "{}"}).encode())
    Verdicts(folder=tmp_path, device=CARD).failure(counted(seen), request())
    assert len(seen) == 2
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "verdicts").write_text("a file in its place")
    seen: list[KernelRequest] = []
    assert Verdicts(folder=tmp_path, device=CARD).failure(counted(seen), request()) is None
    assert len(seen) == 1


def test_no_half_written_file_stays_and_the_last_writer_wins(tmp_path: Path) -> None:
    entries = EntryFolder(folder=tmp_path)
    entries.write("key", {"microseconds": 1.5})
    entries.write("key", {"microseconds": 2.5})
    assert entries.read("key") == {"microseconds": 2.5}
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_several_processes_that_write_one_entry_never_show_a_part_of_it(tmp_path: Path) -> None:
    writer = (
        "import sys; from pathlib import Path; from vtensors.kernel_entries import EntryFolder\n"
        "for turn in range(100):\n"
        "    EntryFolder(folder=Path(sys.argv[1])).write('key', {'text': sys.argv[2] * 20000})\n"
    )
    command = [sys.executable, "-c", writer, str(tmp_path)]
    running = [subprocess.Popen([*command, letter]) for letter in "ab"]
    entries, seen = EntryFolder(folder=tmp_path), set()
    while any(process.poll() is None for process in running):
        if any(tmp_path.glob("*.json")):
            fact = entries.read("key")
            assert fact is not None
            seen.add(str(fact["text"])[:1])
    assert [process.returncode for process in running] == [0, 0]
    assert seen <= {"a", "b"}
    assert seen


def test_nothing_is_tested_while_a_graph_is_captured_but_what_passed_before_is_used(tmp_path: Path) -> None:
    seen: list[KernelRequest] = []
    spec = counted(seen)
    plan = plan_kernels(request(), [spec, kernel("linear_slow", cost=99.0)])
    with pytest.raises(RequestError, match="while a CUDA graph is captured") as caught:
        bind_plan(plan, ["weight"], Verdicts(folder=tmp_path, device=CARD, capturing=lambda: True))
    assert "'linear_fast'" in str(caught.value)
    assert seen == []
    Verdicts(folder=tmp_path, device=CARD).failure(spec, request())
    captured = Verdicts(folder=tmp_path, device=CARD, capturing=lambda: True)
    assert bind_plan(plan, ["weight"], captured).kernel is spec


def test_a_kernel_without_a_self_test_is_taken_at_its_word() -> None:
    assert Verdicts(capturing=lambda: True).failure(kernel("plain"), request()) is None


def test_a_fingerprint_that_fails_counts_against_the_kernel(tmp_path: Path) -> None:
    spec = kernel("linear_fast", probe=failing("not reached"), fingerprint=failing("no compiler"))
    found = Verdicts(folder=tmp_path, device=CARD).failure(spec, request())
    assert found == "failed to say what its self-test depends on: RuntimeError: no compiler"
    assert Verdicts().failure(spec, request()) == "failed its self-test: RuntimeError: not reached"


def test_versions_name_the_distribution_that_brings_a_kernel() -> None:
    plugin = module("fast", {"vtensors_kernels": lambda: [kernel("linear_fast")]})
    plugins = Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})
    versions = kernel_versions(plugins)
    assert versions["linear_fast"] == "fast-dist 1.2"
    assert versions["linear_reference"].startswith("vtensors ")
