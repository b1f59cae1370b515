"""NVFP4 activations on a CUDA device: x, normed or gated first where asked, to codes and scales in the form that a
product reads.

Bit for bit what `FP4Activation` gives for the same 16-bit values. A norm or a gate in front rounds to 16 bits before
x is quantized, as the separate ops do. Reference: `reference/nvfp4_activations.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.arguments import gain_for, input_source, output_for
from vtensors_kernels.compiling.architectures import COMPILED
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream, float_bits, may_depend
from vtensors_kernels.dtypes import dtype_defines

SOURCE, FUNCTION = "common/quantize_nvfp4.cu", "quantize_nvfp4"
GROUP, FRAGMENT_BYTES = 16, 576
# What happens to x first: nothing, the weight's pre-scale, an RMSNorm, silu(gate) * up.
SOURCES: Mapping[str, int] = MappingProxyType({"plain": 0, "pre_scale": 1, "norm": 2, "swiglu": 3})
# Codes and scales as they are, with scales in tiles of 128 x 4, as operands of mma.m16n8k64, or multiplied to 16 bits.
OUTPUTS: Mapping[str, int] = MappingProxyType({"codes": 0, "tiled": 1, "fragments": 2, "widened": 3})
_TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "codes": COMPILED,
        "tiled": ("sm_100a", "sm_103a"),
        "fragments": ("sm_120a", "sm_121a"),
        "widened": COMPILED,
    }
)
# Rows and groups are padded to multiples of these.
_PADDING: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"codes": (1, 1), "tiled": (128, 4), "fragments": (8, 8), "widened": (1, 1)}
)
_NORM_THREADS, _THREADS = 256, 64
_ARGUMENTS = 11
# Launches kept ready: decode batches.
_READY = 64


def _defines(f16: int, source: str, output: str) -> dict[str, int]:
    return {"VT_F16": f16, "VT_SOURCE": SOURCES[source], "VT_OUTPUT": OUTPUTS[output]}


INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE,
        function=FUNCTION,
        defines=_defines(f16, source, output),
        targets=_TARGETS[output],
        hot=True,
        expects=("e2m1", "e4m3"),
    )
    for output in OUTPUTS
    for source in SOURCES
    for f16 in (0, 1)
    # Codes by themselves are what tests look at.
    if output != "codes" or source == "plain"
)


class NVFP4Quantizer:
    """call(x, gain=None, eps=0.0) -> (what `output` says, scales).

    activation: on a CUDA device. k: K, a multiple of 16. dtype: of x, bfloat16 or float16. source: of SOURCES;
    pre_scale: [K] float, with that source. output: of OUTPUTS.
        codes      [M, K / 2] uint8, low nibble = even k; scales [M, K / 16] float8_e4m3fn
        tiled      the same; scales [128 * tiles, 4 * tiles] in tiles of 128 rows x 4, zero for padding
        fragments  [ceil(M / 8), ceil(K / 128), 576] uint8, as `common/quantize_nvfp4.cu` says; no scales: empty
        widened    [M, K] of the dtype, code * scale, exact; no scales: empty
    Errors: RequestError for arguments that do not fit; CompileError, LaunchError.
    """

    def __init__(
        self,
        activation: FP4Activation,
        k: int,
        dtype: torch.dtype,
        *,
        source: str = "plain",
        output: str = "widened",
        pre_scale: Tensor | None = None,
    ) -> None:
        stored = stored_global(activation)
        if (
            stored.device.type != "cuda"
            or k % GROUP
            or not k
            or (pre_scale is not None) != (source == "pre_scale")
        ):
            raise RequestError(
                "no such quantizer",
                seen=f"K = {k} on {stored.device}, {source}, pre-scale: {pre_scale is not None}",
                accepted=f"K a multiple of {GROUP} on a CUDA device; a pre-scale with the source `pre_scale`",
            )
        self._global, self._divides = stored.float().contiguous(), int(activation.global_scale is None)
        self._pre_scale = None if pre_scale is None else pre_scale.float().contiguous()
        self._k, self._dtype, self._source, self._output = k, dtype, source, output
        self._rows, self._groups = _PADDING[output][0], padded(k // GROUP, _PADDING[output][1])
        defines = _defines(dtype_defines(dtype)["VT_F16"], source, output)
        self._function = compiled_function(SOURCE, FUNCTION, stored.device.index or 0, defines)
        self._launches: list[Launch | None] = [None] * _READY
        self._none = torch.empty(0, dtype=torch.uint8, device=stored.device)

    def __call__(self, x: Tensor, gain: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor]:
        """x: [M, K] of the dtype, [M, 2 K] (gate, up) for swiglu. gain: [K] float32, and eps, with a norm."""
        x = self._checked(x)
        gain = gain_for(self._k, self._global.device, gain, wanted=self._source == "norm")
        factor = self._pre_scale if gain is None else gain
        m = x.shape[0]
        out, scales = self._outputs(x, m)
        if m:
            self._launch(m).call(
                current_stream(x.device),
                x.data_ptr(),
                0 if factor is None else factor.data_ptr(),
                self._global.data_ptr(),
                out.data_ptr(),
                scales.data_ptr(),
                x.stride(0),
                m,
                self._k,
                self._groups,
                self._divides,
                float_bits(eps) if eps else 0,
            )
        return out, scales

    def _checked(self, x: Tensor) -> Tensor:
        """x as the kernel reads it, copied only where rows are not at multiples of 16 bytes."""
        columns = 2 * self._k if self._source == "swiglu" else self._k
        if x.dim() != 2 or x.shape[1] != columns or x.dtype != self._dtype or x.device != self._global.device:
            raise RequestError(
                "the input does not fit the quantizer",
                seen=f"{x.dtype} {list(x.shape)} on {x.device}",
                accepted=f"{self._dtype} [M, {columns}] on {self._global.device}",
            )
        if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
            return x
        x = x.contiguous()
        return x.clone() if x.data_ptr() % 16 else x

    def _outputs(self, x: Tensor, m: int) -> tuple[Tensor, Tensor]:
        if self._output == "widened":
            return x.new_empty(m, self._k), self._none
        if self._output == "fragments":
            shape = (padded(m, 8) // 8, self._groups // 8, FRAGMENT_BYTES)
            return output_for(x, shape, torch.uint8, None), self._none
        codes = output_for(x, (m, self._k // 2), torch.uint8, None)
        scales = output_for(x, (padded(m, self._rows), self._groups), torch.uint8, None)
        return codes, scales.view(torch.float8_e4m3fn)

    def _launch(self, m: int) -> Launch:
        if m > _READY:
            return self._made(m)
        launch = self._launches[m - 1]
        if launch is None:
            launch = self._launches[m - 1] = self._made(m)
        return launch

    def _made(self, m: int) -> Launch:
        rows, norm = padded(m, self._rows), self._source == "norm"
        return Launch(
            function=self._function,
            grid=(rows if norm else rows * -(-self._groups // _THREADS), 1, 1),
            block=(_NORM_THREADS if norm else _THREADS, 1, 1),
            arguments=_ARGUMENTS,
            dependent=may_depend(self._function),
        )


def input_quantizer(
    activation: FP4Activation,
    k: int,
    dtype: torch.dtype,
    *,
    pre_scale: Tensor | None,
    norm: bool,
    output: str,
) -> NVFP4Quantizer:
    """The quantizer of a weight's input. Raises RequestError for a norm before a pre-scale: two roundings."""
    source = input_source(pre_scale, norm=norm)
    return NVFP4Quantizer(activation, k, dtype, source=source, output=output, pre_scale=pre_scale)


def stored_global(activation: FP4Activation) -> Tensor:
    """[] the global scale as stored, multiplier or divisor."""
    stored = activation.global_scale if activation.global_scale is not None else activation.global_divisor
    if stored is None:
        raise RequestError("an FP4 activation without a global scale")
    return stored


def padded(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple
