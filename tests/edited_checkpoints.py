"""Copies of small checkpoints with some of their tensors changed.

Import as `from edited_checkpoints import edited, repeat_rows`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
Tensors = dict[str, Tensor]


def edited(source: Path, folder: Path, change: Callable[[Tensors], None]) -> Path:
    """`folder`, with the checkpoint `source` of one file in it after `change` has worked on its tensors by name."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name != FILE:
            shutil.copyfile(path, folder / path.name)
    tensors = load_file(source / FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)
    return folder


def repeat_rows(tensors: Tensors, module: str, sources: Sequence[int]) -> None:
    """Row r of the module's weight, and of its scales if these go by rows, becomes row sources[r]."""
    index = torch.tensor(sources)
    rows = len(sources)
    names = [name for name in tensors if name.rpartition(".")[0] == module]
    for name in names:
        if tensors[name].shape[:1] == (rows,):
            # As bytes: not every dtype of eight bits can be indexed.
            stored = tensors[name]
            raw = stored.view(torch.uint8) if stored.element_size() == 1 else stored
            tensors[name] = raw[index].view(stored.dtype)
    if f"{module}.weight" not in names or tensors[f"{module}.weight"].shape[0] != rows:
        raise KeyError(f"{module} has no weight of {rows} rows")
