"""`load_model`: a checkpoint checked, its weights read in canonical form, the model built over them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors.activations import ActivationRequest
from vtensors.checkpoint import Checkpoint, open_checkpoint
from vtensors.counts import agreeing, counted
from vtensors.errors import RequestError
from vtensors.inspection import activation_warnings, scheme_rows
from vtensors.lock import Lock
from vtensors.manager import Plugins
from vtensors.provenance import Provenance
from vtensors.records import Selected
from vtensors_engine.devices import resolve_device, resolve_dtype
from vtensors_engine.fallbacks import report_fallbacks
from vtensors_engine.weight_reading import WeightReading
from vtensors_kernels.self_tests import measured_costs, verdicts_for
from vtensors_plugins.architectures.build import BuildOptions
from vtensors_plugins.architectures.checkpoint_inputs import (
    CheckpointWeights,
    config_dtype,
    executed_modes,
    kernel_rules,
    planned_modules,
    registered_kernels,
    require_architecture,
)

_log = logging.getLogger("vtensors")
_LAYER = re.compile(r"layers\.(\d+)\.[^.]+$")
KV_CACHE_DTYPES = ("auto", "fp8")


@attrs.define(kw_only=True, eq=False)
class LoadedModel:
    """A model that runs, with the checkpoint it came from.

    request: the activation precision asked for. kv_cache: `16bit` or `fp8`.
    selected: which kernel each weight got, with its declared and executed activations, and why others lost.
    """

    checkpoint: Checkpoint
    request: ActivationRequest
    kv_cache: str
    selected: tuple[Selected, ...]
    _model: Any

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self.checkpoint.config

    @property
    def provenance(self) -> Provenance:
        """Source, commit and header hashes of the checkpoint."""
        return self.checkpoint.provenance

    @property
    def decoder(self) -> Any:
        """What the architecture built, with its kernels bound."""
        return self._model

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self._model.vocab_size)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self._model.num_layers)

    @property
    def max_positions(self) -> int:
        """Most positions of one sequence."""
        return int(self._model.max_positions)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and logits."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device(self._model.device)

    def new_state(self) -> Any:
        """An empty state for one sequence: KV cache, convolution and delta-rule state."""
        return self._model.new_state()

    def step(self, token_ids: Tensor, state: Any) -> Tensor:
        """token_ids [T] int64 appended to the sequence -> logits [V] of the last one, model dtype."""
        self._check_files()
        logits: Tensor = self._model.step(token_ids, state)
        return logits

    def logits(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] int64 or int32 -> logits [B, T, V] in the model's dtype; rows are independent.

        Raises RequestError for anything else, an empty batch, and ids outside of the vocabulary.
        """
        _check_batch(input_ids)
        if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < self.vocab_size:
            raise RequestError(
                "token ids outside of the vocabulary",
                seen=f"{int(input_ids.min())}..{int(input_ids.max())}",
                accepted=f"0..{self.vocab_size - 1}",
                fix="encode the text with the model's own tokenizer",
            )
        self._check_files()
        with torch.inference_mode():
            logits: Tensor = self._model.logits(input_ids)
        return logits

    def _check_files(self) -> None:
        # On another device the weights are copies; on a CPU they are the files' own pages.
        if self.device.type == "cpu":
            self.checkpoint.check_mapped()

    def executed_summary(self) -> list[dict[str, Any]]:
        """Rows as `inspect --json` gives them under `schemes`."""
        return scheme_rows(self.checkpoint, self.request)


def _check_batch(input_ids: object) -> None:
    accepted = "a torch tensor [B, T] of int64 or int32, B and T above zero"
    if not isinstance(input_ids, Tensor):
        raise RequestError(
            "input_ids is not a tensor",
            seen=type(input_ids).__name__,
            accepted=accepted,
            fix="wrap the ids in torch.tensor([...])",
        )
    if input_ids.ndim != 2 or not input_ids.numel() or input_ids.dtype not in (torch.int64, torch.int32):
        seen = f"{input_ids.dtype} {list(input_ids.shape)}"
        raise RequestError(
            "input_ids is not a batch of token ids",
            seen=seen,
            accepted=accepted,
            fix="pass ids[None] for one sequence of integers",
        )


def load_model(
    source: str | PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    activations: str | None = None,
    *,
    revision: str | None = None,
    kv_cache_dtype: str = "auto",
    plugins: Plugins | None = None,
    lock: Lock | str | PathLike[str] | None = None,
) -> LoadedModel:
    """The model of a checkpoint, weights quantized as stored.

    source, revision, lock: as for `open_checkpoint`; a repository that is not cached is downloaded.
    device: `cpu`, `cuda`, ...; None takes CUDA where there is one.
    dtype: of activations; None is float32 on a CPU and the checkpoint's own on CUDA.
    activations: None or `16bit` (weight-only), `declared`, `fp4`; the switches `VT_MODELOPT_W4A4` and
    `VT_FP8_W8A8` apply where it is None (the latter also beside `fp4`).
    kv_cache_dtype: `auto` keeps K and V in dtype; `fp8` rounds them to E4M3 with the checkpoint's scales.
    Errors: whatever `Checkpoint.check` and `Checkpoint.read` refuse, each naming the tensor;
    ArchitectureError where no architecture plugin knows the model; RequestError for bad arguments.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise RequestError(
            "unknown kv_cache_dtype",
            seen=repr(kv_cache_dtype),
            accepted=", ".join(KV_CACHE_DTYPES),
            fix="pass one of these",
        )
    place = resolve_device(device)
    asked = resolve_dtype(dtype, place)
    path = str(source) if isinstance(source, PathLike) else source
    pinned = lock if lock is None or isinstance(lock, Lock) else Path(lock)
    checkpoint = open_checkpoint(path, revision, download=True, plugins=plugins, lock=pinned)
    request = checkpoint.activation_request(activations)
    architecture = require_architecture(checkpoint)
    checkpoint.check()
    for text in (*checkpoint.warnings, *activation_warnings(checkpoint, request)):
        _log.warning("%s", text)
    for conflict in checkpoint.conflicts:
        _log.warning("%s: says %s; found %s; followed: %s", *attrs.astuple(conflict)[:4])
    compute = asked or config_dtype(checkpoint)
    modules = planned_modules(checkpoint)
    with closing(
        WeightReading(checkpoint=checkpoint, modules=modules, device=place, dtype=compute)
    ) as reading:
        verdicts = verdicts_for(checkpoint, place)
        options = BuildOptions(
            dtype=compute,
            device=place,
            kernels=registered_kernels(checkpoint),
            executed=executed_modes(checkpoint, request),
            kv_quant=_kv_quant(checkpoint) if kv_cache_dtype == "fp8" else None,
            rules=kernel_rules(checkpoint),
            cost_of=measured_costs(checkpoint, verdicts),
            verdicts=verdicts,
            debug_nan=checkpoint.switches.flag("VT_DEBUG_NAN"),
        )
        module, function = architecture.build.split(":")
        weights = CheckpointWeights(modules=modules, read=reading.read)
        model = getattr(import_module(module), function)(checkpoint.config, weights, options)
    reading.tell(len(modules))
    selected = tuple(_declared_records(model.selected, checkpoint, modules))
    strict = "fallbacks" in checkpoint.switches.names("VT_STRICT")
    report_fallbacks(selected, options.kernels, place.type, refuse=strict, rules=options.rules)
    for record in selected:
        checkpoint.plugins.selected(record)
    return LoadedModel(
        checkpoint=checkpoint,
        request=request,
        kv_cache="fp8" if kv_cache_dtype == "fp8" else "16bit",
        selected=selected,
        model=model,
    )


def _declared_records(
    records: Iterable[Selected], checkpoint: Checkpoint, modules: Mapping[str, str]
) -> Iterator[Selected]:
    """The builder's records under the checkpoint's module names, with what is declared of each module.

    Modules of one group share its names: a mixture has hundreds.
    """
    groups: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for record in records:
        module = checkpoint.modules.get(modules.get(record.module, ""))
        if module is None:
            yield record
            continue
        key = id(record.group)
        if key not in groups:
            # The record's own tuple is kept beside it, so that no other gets its identity.
            groups[key] = record.group, tuple(modules.get(name, name) for name in record.group)
        yield attrs.evolve(record, module=module.name, declared=module.declared, group=groups[key][1])


def _kv_quant(checkpoint: Checkpoint) -> dict[int, tuple[float, float]]:
    """layer -> (k_scale, v_scale); layers without scales get 1.0, said once."""
    scales: dict[int, tuple[float, float]] = {}
    for module, found in checkpoint.kv_scales().items():
        layer = _LAYER.search(module)
        for note in found.notes:
            _log.warning("%s", note)
        if layer is not None:
            scales[int(layer[1])] = (found.k, found.v)
    plan = checkpoint.plan
    layers = {e.layer for e in plan.weights.values() if e.part == "attention"} if plan else set()
    bare = sorted(layer for layer in layers if layer is not None and layer not in scales)
    if bare:
        layers_have = f"{counted(len(bare), 'layer')} {agreeing(len(bare), 'has', 'have')}"
        _log.warning("FP8 KV cache: %s no k_scale / v_scale; 1.0 is used", layers_have)
    return {**dict.fromkeys(bare, (1.0, 1.0)), **scales}
