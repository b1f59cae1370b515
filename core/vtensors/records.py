"""The records that plugins and core exchange: declarations, claims, weights, architectures, kernels.

All are frozen; hooks return lists of them at load time. Nothing here imports torch or cupy: what core must
name from the formats, kernels and engine packages it names as Protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from vtensors.forms import Form
from vtensors.tensors import TensorInfo

if TYPE_CHECKING:
    import click
    import torch

    from vtensors.configs import ConfigFiles
    from vtensors.matching import Matcher

API_VERSION = 1


@attrs.frozen(kw_only=True)
class PluginInfo:
    """Who a plugin is. api_version: the `API_VERSION` it was written for."""

    name: str
    summary: str
    api_version: int = API_VERSION


# --- declarations -----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class DeclaredScheme:
    """What the configuration says of one module.

    weight: `nvfp4`, `fp8`, `mxfp8`, `unquantized`, or another family name in the publisher's spelling.
    algorithm: the publisher's own word, for example `W4A16_NVFP4` or `float-quantized`.
    activations: `16bit`, `fp4`, `fp8-static` or `fp8-dynamic`.
    where: the file and key that say so.
    explicit: the module is named by the entry itself (not by a class such as `Linear` or a catch-all).
    block: rows and columns of a scale block, where declared.
    group_size: elements of K per scale, where declared.
    """

    weight: str
    algorithm: str
    activations: str
    where: str
    explicit: bool = False
    block: tuple[int, int] | None = None
    group_size: int | None = None


@attrs.frozen(kw_only=True)
class Conflict:
    """Two statements that cannot both hold, and which one was followed.

    where: file, key or module; says: the statement not followed; instead: the other one; chosen: what was
    done and why. modules: how many modules it concerns.
    """

    where: str
    says: str
    instead: str
    chosen: str
    modules: int = 1


@attrs.frozen(kw_only=True)
class KvCacheDeclared:
    """What the configuration says of the KV cache: algorithm as written (`FP8`), and where."""

    algorithm: str
    where: str


@attrs.frozen(kw_only=True)
class Declaration:
    """One convention's reading of the configuration files.

    scheme_of: module name -> DeclaredScheme; None where the declaration says nothing of the module.
    matchers: the ignore and target lists, which remember the entries that matched something.
    summary: one line for people, for example `modelopt 0.45.0 MIXED_PRECISION`.
    """

    convention: str
    scheme_of: Callable[[str], DeclaredScheme | None]
    summary: str
    kv_cache: KvCacheDeclared | None = None
    conflicts: tuple[Conflict, ...] = ()
    matchers: tuple[Matcher, ...] = ()
    warnings: tuple[str, ...] = ()


# --- claims -----------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, slots=True)
class TensorGroup:
    """The tensors of one module. tensors: suffix behind the module name -> TensorInfo."""

    module: str
    tensors: Mapping[str, TensorInfo]


@attrs.frozen(kw_only=True, slots=True)
class Claim:
    """One convention's statement that it can read a module, with what it found.

    module: name of the weight, as in the checkpoint; an expert inside a stacked tensor has a name of its own.
    scheme: canonical scheme. shape: logical (N, K), or the tensor's own shape where it is not a matrix.
    roles: role -> TensorInfo. form: the accepted form that fits. part: where the matrix lies in a stacked
    tensor, or None. declared: what this convention's configuration says of the module.
    """

    module: str
    convention: str
    scheme: str
    shape: tuple[int, ...]
    roles: Mapping[str, TensorInfo]
    form: Form
    part: StackedPart | None = None
    declared: DeclaredScheme | None = None


@attrs.frozen(kw_only=True, slots=True)
class StackedPart:
    """Where one expert's matrix lies in a stacked tensor [E, rows, K] (or [E, K, rows] when transposed)."""

    expert: int
    row_begin: int
    row_end: int
    transposed: bool = False


@attrs.frozen(kw_only=True, slots=True)
class Refusal:
    """Why a convention does not claim a group."""

    module: str
    reason: str


@attrs.frozen(kw_only=True)
class ClaimRequest:
    """All groups of a checkpoint, with this convention's declaration (None: it declared nothing)."""

    groups: Sequence[TensorGroup]
    declaration: Declaration | None


# --- weights ----------------------------------------------------------------------------------------------


class Weight(Protocol):
    """A weight in canonical form. The classes live in `vtensors_formats` and in scheme plugins."""

    @property
    def scheme(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def dequantize(self, dtype: torch.dtype = ...) -> torch.Tensor: ...
    def rows(self, start: int, stop: int) -> Weight: ...
    def to(self, device: torch.device | str) -> Weight: ...
    def check_values(self, names: Mapping[str, str]) -> None: ...


class TensorSource(Protocol):
    """Gives torch tensors for header entries; conventions read through it.

    view: the stored bytes as a torch tensor of the header's dtype and shape (zero-copy where mapped);
    F8_E8M0 and F4 come as uint8, F8_E4M3 as float8_e4m3fn.
    """

    def view(self, info: TensorInfo) -> torch.Tensor: ...


@attrs.frozen(kw_only=True)
class Scheme:
    """A number format. weight_class: dotted path `package.module:Class`, imported when first needed."""

    name: str
    summary: str
    bits_per_weight: str
    weight_class: str


@attrs.frozen(kw_only=True)
class Convention:
    """How one publisher spells weights on disk.

    declare: configuration files -> Declaration, or None when they are not this convention's.
    read: a claim -> canonical Weight; reads only the claim's tensors.
    claim: all groups at once -> claims and refusals; None = by the forms (see `vtensors.claiming`).
    forms: every accepted spelling; the docs and error messages are made from them.
    overrides: names of conventions that this one replaces where both claim a tensor.
    quant_methods: values of `quant_method` that it answers to, for messages.
    write: reserved for conversion; None = this convention cannot be written.
    """

    name: str
    summary: str
    forms: tuple[Form, ...]
    declare: Callable[[ConfigFiles], Declaration | None]
    read: Callable[[Claim, TensorSource], Weight]
    claim: Callable[[ClaimRequest], list[Claim | Refusal]] | None = None
    overrides: tuple[str, ...] = ()
    quant_methods: tuple[str, ...] = ()
    write: Callable[..., Any] | None = None


# --- architectures ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, slots=True)
class ExpectedWeight:
    """One weight that a model needs.

    module: name in the checkpoint. shape: logical shape. part: `attention`, `linear_attention`, `mlp`,
    `experts`, `shared_expert`, `router`, `lm_head`, `embeddings`, `norm` or `other`.
    layer: index or None. required: False for a weight that may be absent.
    bias: whether a bias comes with it; None = either way.
    """

    module: str
    shape: tuple[int, ...]
    part: str
    layer: int | None = None
    required: bool = True
    bias: bool | None = None


@attrs.frozen(kw_only=True)
class Waiver:
    """Tensors that are left alone on purpose. prefix: start of the tensor name; reason: why."""

    prefix: str
    reason: str


@attrs.frozen(kw_only=True)
class ModelPlan:
    """What an architecture expects of a checkpoint; made from config and names alone, without torch.

    weights: the model's own (canonical) name -> ExpectedWeight. waivers: prefixes left alone.
    tied_head: canonical name of the head if it may be shared with the embeddings, else None.
    """

    weights: Mapping[str, ExpectedWeight]
    waivers: tuple[Waiver, ...] = ()
    notes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Architecture:
    """A model family.

    matches: the `config.json` dictionary -> whether this is the family.
    plan: (config, module names of the checkpoint) -> ModelPlan; torch-free.
    build: dotted path `package.module:function`, called as `function(config, weights, options)` where
    weights maps canonical names to Weights and options is the engine's `BuildOptions`; returns a Model.
    """

    name: str
    summary: str
    model_types: tuple[str, ...]
    matches: Callable[[Mapping[str, Any]], bool]
    plan: Callable[[Mapping[str, Any], Sequence[str]], ModelPlan]
    build: str


# --- kernels, switches, commands --------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class KernelRequest:
    """What a layer asks for: the op, the weight's scheme, the activation mode and the device.

    capability: (major, minor) of a CUDA device, None on a CPU.
    """

    op: str
    scheme: str
    activations: str
    device: str
    capability: tuple[int, int] | None = None


@attrs.frozen(kw_only=True)
class KernelSpec:
    """Code that computes one op on some schemes on some devices.

    op: a name from the documented op list. schemes: scheme names, or `("*",)` for anything that can
    dequantise. targets: `cpu`, `portable`, `sm_90a`, ... numerics: `reference`, `bitwise` or a tolerance.
    refuse: request -> reason why not, or None. bind: (weight, request) -> the callable put into the layer.
    cost: estimated microseconds, lower wins; the reference is last.
    """

    name: str
    op: str
    schemes: tuple[str, ...]
    targets: tuple[str, ...]
    numerics: str
    refuse: Callable[[KernelRequest], str | None]
    bind: Callable[[Any, KernelRequest], Callable[..., Any]]
    cost: float = 0.0


@attrs.frozen(kw_only=True)
class Switch:
    """An environment variable. kind: `bool`, `str`, `path`, `names`; accepted: allowed words, if closed."""

    name: str
    kind: str
    default: str
    summary: str
    accepted: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Command:
    """A subcommand of `vtensors`. load: dotted path `package.module:click_command`, imported when called."""

    name: str
    summary: str
    load: str


@attrs.frozen(kw_only=True)
class Selected:
    """Told to observers when a kernel was chosen for a module."""

    module: str
    op: str
    scheme: str
    declared: str
    executed: str
    kernel: str
    rejected: tuple[tuple[str, str], ...] = ()


@attrs.frozen(kw_only=True)
class Progress:
    """Told to observers while long work goes on. unit: `bytes`, `tensors`, `tokens`."""

    task: str
    done: int
    total: int
    unit: str


class Model(Protocol):
    """A model that can be run; built by an architecture plugin."""

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor: ...


ProgressSink = Callable[[Progress], None]
ModuleNames = Iterator[str]

if TYPE_CHECKING:
    CommandObject = click.Command
