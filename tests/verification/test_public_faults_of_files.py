"""Entries of the list of public failures about files, links, hashes and headers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from builders import header_bytes, write_safetensors
from tiny_checkpoints import Tiny
from verify_cases import CASES
from verify_tools import SECOND, SHARD, UP, hub_cache, overwritten_blob, run
from vtensors.verification import open_tolerantly, structure_findings


@pytest.mark.fault("B28")
def test_a_blob_that_was_written_to_is_found_by_its_hash(tmp_path: Path) -> None:
    assert run(hub_cache(tmp_path / "good"), hashes=True).findings == ()
    snapshot = overwritten_blob(tmp_path / "bad")
    (finding,) = run(snapshot, hashes=True).findings
    assert (finding.severity, finding.code, finding.tensor) == ("error", "content-differs", SHARD)
    assert os.path.basename(os.readlink(snapshot / SHARD)) in finding.expected


@pytest.mark.fault("B28")
def test_a_small_file_is_held_against_gits_hash(tmp_path: Path) -> None:
    plain = (Tiny.plain_model().save(tmp_path / "x") / "config.json").read_bytes()
    snapshot = hub_cache(tmp_path / "bad", content=plain + b"\n")
    (finding,) = run(snapshot, hashes=True).findings
    assert (finding.code, finding.tensor) == ("content-differs", "config.json")


@pytest.mark.fault("B55")
def test_an_unknown_prefix_is_named_once(tmp_path: Path) -> None:
    tiny = Tiny.plain_model("qwen3_5")
    tiny.tensors = {
        n.replace("model.", "model.language_model.language_model."): t for n, t in tiny.tensors.items()
    }
    (finding,) = run(tiny.save(tmp_path / "model")).findings
    assert finding.code == "refused-model"
    assert "unknown prefix 'model.language_model.language_model.'" in finding.seen


@pytest.mark.fault("B56")
def test_a_missing_shard_is_one_finding_and_the_other_one_is_still_checked(tmp_path: Path) -> None:
    tiny = Tiny.plain_model()
    names = list(tiny.tensors)
    tiny.tensors[names[0]][3, 4] = float("nan")
    folder = tiny.save(tmp_path / "model", shards=2)
    (folder / SECOND).unlink()
    report = run(folder)
    assert [(f.code, f.tensor) for f in report.findings] == [
        ("missing-file", SECOND),
        ("not-finite", names[0]),
    ]
    assert f"puts {len(names[1::2])} tensors into it" in report.findings[0].seen
    assert "incomplete download" in report.findings[0].fix
    assert "first at [3, 4]" in report.findings[1].seen


@pytest.mark.fault("B56")
@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
def test_what_a_missing_shard_would_hold_is_not_listed_tensor_by_tensor(family: str, tmp_path: Path) -> None:
    tiny = Tiny.modelopt("NVFP4", family, kv_cache_scheme="FP8")
    tiny.config["quantization_config"]["ignore"].append("model.embed_tokens")
    attention = [name.removesuffix(".weight") for name in tiny.tensors if name.endswith("_proj.weight")]
    for module in attention:
        if module.endswith(("self_attn.k_proj", "self_attn.v_proj")):
            tiny.tensors[f"{module}.{module[-6]}_scale"] = torch.tensor(0.02)
    for lost in (1, 2):
        folder = tiny.save(tmp_path / str(lost), shards=2)
        (folder / f"model-{lost:05}-of-00002.safetensors").unlink()
        codes = [finding.code for finding in run(folder).findings]
        assert codes == ["missing-file"]


@pytest.mark.fault("B56")
def test_input_scales_in_a_missing_shard_are_not_called_missing(tmp_path: Path) -> None:
    tiny = Tiny.modelopt()
    folder = tiny.save(tmp_path / "model", shards=2)
    parts = {SECOND: {n: t for n, t in tiny.tensors.items() if n.endswith("input_scale")}}
    first = "model-00001-of-00002.safetensors"
    parts[first] = {n: t for n, t in tiny.tensors.items() if n not in parts[SECOND]}
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert run(folder).findings == ()
    (folder / SECOND).unlink()
    assert [f.code for f in run(folder).findings] == ["missing-file"]


def test_a_tensor_in_another_shard_than_the_index_says_is_named(tmp_path: Path) -> None:
    folder = Tiny.plain_model().save(tmp_path / "model", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    index["model.norm.weight"] = next(f for f in index.values() if f != index["model.norm.weight"])
    del index["lm_head.weight"]
    path.write_text(json.dumps({"weight_map": index}))
    findings = run(folder).findings
    assert {(f.code, f.tensor) for f in findings} == {
        ("index-differs", "model.norm.weight"),
        ("index-differs", "lm_head.weight"),
    }


@pytest.mark.fault("B58")
def test_strays_beside_indexed_shards_are_listed_each(tmp_path: Path) -> None:
    folder = Tiny.plain_model().save(tmp_path / "model", shards=2)
    for name in (SHARD, "consolidated.safetensors"):
        write_safetensors(folder / name, {"x": ("U8", (1,), b"1")})
    report = run(folder)
    assert [(f.code, f.tensor) for f in report.findings] == [
        ("stray-file", "consolidated.safetensors"),
        ("stray-file", SHARD),
    ]


@pytest.mark.fault("B59")
@pytest.mark.parametrize(
    ("data", "code", "seen"),
    [
        (b"", "damaged-header", "the file is empty"),
        (header_bytes("{}")[:8] + b"\xff" * 9, "damaged-header", "cut off|not JSON|UTF-8|longer"),
        (b"\xff" * 7 + b"\x7f" + b"x" * 99, "damaged-header", "longer than the file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n",
            "damaged-header",
            "git-LFS pointer",
        ),
        (header_bytes("not json") + b"x", "damaged-header", "JSON"),
    ],
)
def test_each_damage_of_a_file_has_its_own_words(data: bytes, code: str, seen: str, tmp_path: Path) -> None:
    folder = Tiny.plain_model().save(tmp_path / "model")
    (folder / SHARD).write_bytes(data)
    (finding,) = run(folder).findings
    assert (finding.severity, finding.code, finding.tensor) == ("error", code, SHARD)
    assert any(word in finding.seen for word in seen.split("|"))


@pytest.mark.fault("B61")
def test_new_and_invented_dtypes_are_listed_not_stumbled_over(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / SHARD,
        {
            "a.weight": ("F4", (2, 8), bytes(8)),
            "b.x": ("F8_E8M0", (3,), bytes(3)),
            "c.x": ("F6", (3,), bytes(3)),
        },
    )
    named = {f.tensor for f in run(tmp_path).findings}
    assert {"a.weight", "b.x", "c.x"} <= named


@pytest.mark.fault("B62")
def test_quantized_tensors_that_nothing_declares_are_named_as_such(tmp_path: Path) -> None:
    report = run(CASES["undeclared-quantization"].make(tmp_path / "model"))
    assert {f.code for f in report.findings} == {"undeclared-quantization"}
    assert "would fit as nvfp4" in report.findings[0].seen


@pytest.mark.fault("B71")
def test_a_broken_link_names_where_it_leads(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "cache")
    copied = Path(shutil.copytree(snapshot, tmp_path / "copy", symlinks=True))
    findings = [f for f in run(copied).findings if f.tensor == SHARD]
    assert [f.code for f in findings] == ["broken-link"]
    assert "blobs" in findings[0].seen


def test_every_problem_is_listed_not_the_first_alone(tmp_path: Path) -> None:
    tiny = Tiny.modelopt()
    del tiny.tensors["model.norm.weight"]
    del tiny.tensors[f"{UP}.weight_scale"]
    tiny.tensors["extra.weight"] = torch.ones(3).bfloat16()
    tiny.config["intermediate_size"] = 64
    folder = tiny.save(tmp_path / "model")
    (folder / "hf_quant_config.json").write_text("[]")
    findings = structure_findings(open_tolerantly(folder))
    assert {"damaged-config", "missing-weight", "unread-tensor", "unexpected-tensor", "wrong-shape"} == {
        f.code for f in findings
    }
    assert len([f for f in findings if f.code == "wrong-shape"]) == 5


def test_every_bad_entry_of_a_header_is_listed(tmp_path: Path) -> None:
    header = {
        "good": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "short": {"dtype": "F32", "shape": [4], "data_offsets": [4, 8]},
        "strange": {"dtype": "U8", "shape": "4", "data_offsets": [8, 12]},
        "over": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    }
    (tmp_path / SHARD).write_bytes(header_bytes(json.dumps(header)) + bytes(12))
    codes = {f.tensor: f.code for f in run(tmp_path).findings if f.code != "unread-tensor"}
    # The bytes of the entries that cannot be read are neither a gap nor trailing.
    assert codes == {
        **dict.fromkeys(("over", "short", "strange"), "damaged-header"),
        "config.json": "unknown-architecture",
    }
