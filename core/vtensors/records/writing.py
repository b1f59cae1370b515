"""How a convention is written: from a weight's parts to tensors, and from all weights to the config files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True, slots=True)
class Layout:
    """Dtype (safetensors name) and shape of one part of a weight, or of one tensor."""

    dtype: str
    shape: tuple[int, ...]


@attrs.frozen(kw_only=True)
class WeightToWrite:
    """One module as its writer sees it; no byte has been read.

    scheme: canonical scheme. shape: (N, K), or the tensor's own shape for a plain one.
    roles: role -> Layout of the parts as they will be handed over: those of the source file where the scheme
    stays (so a global scale comes as `global_scale`, which multiplies, or as `global_divisor`), those of the
    scheme's encoder where it is made anew. `codes` is always among them.
    activations: declared precision, `16bit`, `fp4`, `fp8-static` or `fp8-dynamic`.
    algorithm: the source publisher's word, `` where the weight is made anew.
    block: rows and columns of a scale block (`fp8-block`). group_size: of dynamic activations, where declared.
    """

    module: str
    scheme: str
    shape: tuple[int, ...]
    roles: Mapping[str, Layout]
    activations: str = "16bit"
    algorithm: str = ""
    block: tuple[int, int] | None = None
    group_size: int | None = None


@attrs.frozen(kw_only=True, slots=True)
class OutputTensor:
    """One tensor of the output: `<module>.<suffix>`, made of one role of the weight.

    dtype, shape: as stored in the output. role: whose bytes it holds.
    change: what the bytes go through (little-endian, in the role's dtype -> in this dtype); None = unchanged.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    change: Callable[[bytes], bytes] | None = None


@attrs.frozen(kw_only=True)
class WrittenCheckpoint:
    """What the configuration files must describe.

    config: config.json of the source without its quantization blocks.
    weights: every quantized module as it was spelled. unquantized: name -> shape of the others that hold a
    `weight` of two dimensions or more, so may be linear layers. kv_cache: declared algorithm of the KV cache,
    such as `FP8`. version: of this program.
    """

    config: Mapping[str, Any]
    weights: tuple[WeightToWrite, ...]
    unquantized: Mapping[str, tuple[int, ...]]
    kv_cache: str | None
    version: str


@attrs.frozen(kw_only=True)
class ConventionWriter:
    """How a convention is written; makes it a target of `convert` and `quantize`.

    schemes: quantized schemes that it can hold.
    spell: the tensors of one weight. Raises RequestError, naming field and module, for what the convention
    cannot express; it is asked about every module before any work begins.
    configure: file name -> JSON object for every file that the convention decides (config.json always); a
    file of the source that must not be copied is given as None. Raises RequestError likewise.
    kv_scale: (attention module, `k` or `v`, Layout as stored) -> (tensor name, Layout in the output); None =
    KV-cache scales keep their stored names. Raises RequestError for what cannot be expressed.
    activations: scheme -> declared activations of a weight that is made anew (absent: `16bit`).
    arithmetic: scheme -> the encoder arithmetic that gives this publisher's bytes (absent: `float32`).
    """

    schemes: tuple[str, ...]
    spell: Callable[[WeightToWrite], tuple[OutputTensor, ...]]
    configure: Callable[[WrittenCheckpoint], Mapping[str, Mapping[str, Any] | None]]
    kv_scale: Callable[[str, str, Layout], tuple[str, Layout]] | None = None
    activations: Mapping[str, str] = attrs.field(factory=dict)
    arithmetic: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class EncodeOptions:
    """How values become codes.

    arithmetic: `float32`, or the name of a publisher whose own rounding is followed (`modelopt`).
    mse: search the scale of each block for the least squared error.
    four_over_six: NVFP4 blocks may put their largest value at 4 instead of 6.
    """

    arithmetic: str = "float32"
    mse: bool = False
    four_over_six: bool = False


class Encoder(Protocol):
    """Makes weights of one scheme, some rows at a time; `Scheme.encoder` points to one.

    needs_amax: whether `encode` wants the largest magnitude of the whole matrix.
    row_step: rows are given in multiples of this, except at the end.
    block: rows and columns of its scale blocks, None where there are none.
    """

    @property
    def needs_amax(self) -> bool: ...
    @property
    def row_step(self) -> int: ...
    @property
    def block(self) -> tuple[int, int] | None: ...

    def layouts(self, shape: tuple[int, ...], options: EncodeOptions) -> Mapping[str, Layout]:
        """role -> Layout for a matrix (N, K). Torch-free. Raises RequestError with the rule it breaks."""

    def encode(
        self, rows: torch.Tensor, amax: torch.Tensor | None, options: EncodeOptions
    ) -> Mapping[str, torch.Tensor]:
        """role -> tensor of these rows; a role without rows ([] scales) is given alike each time.

        rows: [n, K] in the source's float dtype. amax: [] float32. Raises RequestError for NaN or infinity.
        """
