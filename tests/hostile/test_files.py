"""Files that are links, locked, huge, replaced or made to use up memory: a VtensorsError, and soon."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import vtensors
from builders import header_bytes, safetensors_bytes, write_json, write_safetensors
from vtensors.errors import CheckpointError, VtensorsError
from vtensors.header import parse_header, read_header
from vtensors.header_entries import MAX_COMPONENTS, MAX_NAME, MAX_RANK, MAX_TENSORS
from vtensors.inspection import inspection

DATA = Path(__file__).resolve().parents[1] / "data"
SIDE = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", "chat_template.jinja")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(DATA / "llamazero-modelopt-nvfp4", folder, ignore=shutil.ignore_patterns("oracle"))
    return folder


@pytest.mark.parametrize("name", [*SIDE, "tokenizer.json", "generation_config.json", "tokenizer_config.json"])
def test_a_side_file_that_links_out_of_the_directory_is_refused(model: Path, name: str) -> None:
    outside = model.parent / "secret"
    outside.write_text('{"a": 1}')
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="link that leaves") as caught:
        vtensors.LLM(str(model), device="cpu").chat_prompt([{"role": "user", "content": "x"}])
    assert caught.value.file == name


def test_a_link_within_the_directory_is_followed(model: Path) -> None:
    (model / "config.json").rename(model / "other.json")
    (model / "config.json").symlink_to("other.json")
    vtensors.open_checkpoint(model).check()


def test_a_link_to_itself_is_refused(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        vtensors.open_checkpoint(model)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a\\x.safetensors", "C:x.safetensors"]
)
def test_an_index_never_leads_out_of_the_directory(model: Path, name: str) -> None:
    write_json(model / "model.safetensors.index.json", {"weight_map": {"a": name}})
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        vtensors.open_checkpoint(model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "."])
def test_a_file_that_must_not_be_read_is_a_checkpoint_error(model: Path, name: str) -> None:
    mode = (model / name).stat().st_mode
    (model / name).chmod(0)
    try:
        with pytest.raises(VtensorsError):
            vtensors.open_checkpoint(model)
    finally:
        (model / name).chmod(mode)


@pytest.mark.parametrize("function", ["open", "listdir"])
def test_permission_denied_by_the_system_is_a_checkpoint_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    if function == "open":
        monkeypatch.setattr(Path, "open", denied)
    else:
        monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(CheckpointError, match="Permission denied"):
        vtensors.open_checkpoint(model)


@pytest.mark.parametrize("change", ["cut", "replaced"])
def test_a_file_that_changes_while_open_is_an_error_in_the_process_that_reads_it(
    model: Path, change: str
) -> None:
    code = f"""
import os, sys, vtensors
path = {str(model / "model.safetensors")!r}
opened = vtensors.open_checkpoint({str(model)!r})
names = list(opened.modules)
opened.read(names[0])
if {change!r} == "cut":
    os.truncate(path, 4096)
else:
    os.rename(path, path + ".old"); open(path, "wb").write(open(path + ".old", "rb").read())
try:
    for name in names: opened.read(name)
except vtensors.VtensorsError as problem:
    sys.exit(0 if "changed while open" in str(problem) else 3)
sys.exit(4)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


BOMBS: dict[str, Callable[[], bytes]] = {
    "a million tensors": lambda: json.dumps(
        {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(1_000_000)}
    ).encode(),
    "lists": lambda: b'{"a":[' + b"[]," * 20_000_000 + b"[]]}",
    "objects": lambda: b"{" + b",".join(b'"%d":{}' % i for i in range(1_400_000)) + b"}",
    "nesting": lambda: b'{"a":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}",
    "unclosed": lambda: b"[" * 2_900_000,
    "one string": lambda: b'{"' + b"x" * 50_000_000 + b'": 1}',
    "dimensions": lambda: b'{"a":{"dtype":"U8","shape":[' + b"1," * 2_000_000 + b'1],"data_offsets":[0,1]}}',
    "digits": lambda: b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,1]}}',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(BOMBS))
def test_a_header_bomb_is_refused_in_bounded_time_and_memory(kind: str) -> None:
    raw = BOMBS[kind]()
    raw = len(raw).to_bytes(8, "little") + raw
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    with pytest.raises(CheckpointError):
        parse_header("x", raw, len(raw))
    assert time.perf_counter() - began < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB: 1 GiB


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"x" * (MAX_NAME + 1): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, "name is too long"),
        ({"a." * MAX_COMPONENTS: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, "name is too long"),
        ({"a": {"dtype": "U8", "shape": [1] * (MAX_RANK + 1), "data_offsets": [0, 1]}}, "dimensions"),
        ({"a": {"dtype": "U8", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}, "too many elements"),
        ({"a": {"dtype": "U8", "shape": [2**63], "data_offsets": [0, 0]}}, "too many elements"),
        ({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 0]}}, "another number of bytes"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [2**63 - 1, 2**63]}}, "range of bytes"),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, "non-negative integers"),
    ],
)
def test_sizes_beyond_every_model_are_refused(header: dict[str, object], says: str) -> None:
    raw = header_bytes(header)
    with pytest.raises(CheckpointError, match=says):
        parse_header("x", raw, len(raw) + 1)


def test_as_many_tensors_as_one_file_may_have_are_read_and_no_more(tmp_path: Path) -> None:
    for count, refused in ((3000, False), (MAX_TENSORS + 1, True)):
        entries = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
        raw = header_bytes(entries)
        if refused:
            with pytest.raises(CheckpointError, match="too many tensors"):
                parse_header("x", raw, len(raw))
        else:
            assert len(parse_header("x", raw, len(raw)).tensors) == count


def test_a_trillion_experts_without_elements_are_refused_at_once(model: Path) -> None:
    write_safetensors(
        model / "model.safetensors", {"model.layers.0.mlp.experts.down_proj": ("BF16", (10**12, 0, 64), b"")}
    )
    began = time.perf_counter()
    opened = vtensors.open_checkpoint(model)
    inspection(opened)
    with pytest.raises(VtensorsError):
        opened.check()
    assert time.perf_counter() - began < 5


def test_a_header_length_beyond_the_file_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**63 - 1).to_bytes(8, "little") + safetensors_bytes({})[8:])
    with pytest.raises(CheckpointError, match="longer than the file"):
        read_header(path, path.name)
