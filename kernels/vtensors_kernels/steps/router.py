"""The choice of experts by one kernel; reference: `reference/router_topk.py`."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, current_stream, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.reference.router_topk import router_topk
from vtensors_kernels.steps.rows import check_rows, device_of, row_stride

SOURCE, FUNCTION = "common/router_topk.cu", "router_topk"
MAX_EXPERTS, MAX_CHOSEN = 1024, 32
WARPS = 4
_PER_LANE = (8, 32)
_READY = 64
# Between weights: exponentials differ by some units in the last place.
_TOLERANCE = 1e-5

INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE, function=FUNCTION, defines={"VT_F16": f16, "VT_PER_LANE": per_lane}, hot=True
    )
    for f16, per_lane in product((0, 1), _PER_LANE)
)


def per_lane_of(experts: int) -> int:
    """Which form takes so many experts. Raises RequestError for more than 1024 or none."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise RequestError(
            "the router kernel cannot choose", seen=f"{experts} experts", accepted=f"1..{MAX_EXPERTS}"
        )
    return next(size for size in _PER_LANE if experts <= 32 * size)


class RouterTopk:
    """call(logits [M, E]) -> experts [M, k] int32, largest logit first, and weights [M, k] float32.

    k: 1..32. dtype: of the logits, bfloat16 or float16. device: CUDA.
    Exactly the experts of the reference: the lowest index first among equal logits, NaN before numbers; weights as
    there, to some units in the last place. A row's bits depend on the row alone.
    Errors: RequestError; CompileError, LaunchError.
    """

    def __init__(self, k: int, dtype: torch.dtype, device: torch.device | str = "cuda") -> None:
        if not 1 <= k <= MAX_CHOSEN:
            raise RequestError(
                "the router kernel cannot choose", seen=f"{k} of them", accepted=f"1..{MAX_CHOSEN}"
            )
        self._k, self._dtype, self._device = k, dtype, device_of(device)
        wanted = [
            Wanted(
                source=SOURCE, name=FUNCTION, defines=(*dtype_defines(dtype).items(), ("VT_PER_LANE", size))
            )
            for size in _PER_LANE
        ]
        functions = compile_many(wanted, self._device.index or 0)
        self._functions = dict(zip(_PER_LANE, functions, strict=True))
        self._ready = {
            size: tuple(_launch(function, rows) for rows in range(1, _READY + 1))
            for size, function in self._functions.items()
        }

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [M, E] of the dtype, rows any distance apart, k <= E <= 1024."""
        check_rows(logits, None, self._dtype, self._device, "router logits")
        rows, experts = logits.shape
        size = per_lane_of(experts)
        if self._k > experts:
            raise RequestError("there are too few experts", seen=f"{experts}", accepted=f"{self._k} or more")
        chosen = torch.empty(rows, self._k, dtype=torch.int32, device=logits.device)
        weights = torch.empty(rows, self._k, dtype=torch.float32, device=logits.device)
        if rows:
            launch = self._ready[size][rows - 1] if rows <= _READY else _launch(self._functions[size], rows)
            launch.call(
                current_stream(logits.device),
                logits.data_ptr(),
                chosen.data_ptr(),
                weights.data_ptr(),
                row_stride(logits),
                rows,
                experts,
                self._k,
            )
        return chosen, weights


def _launch(function: DeviceFunction, rows: int) -> Launch:
    return Launch(
        function=function,
        grid=(-(-rows // WARPS), 1, 1),
        block=(32 * WARPS, 1, 1),
        arguments=7,
        dependent=may_depend(function),
    )


def probe_router(experts: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises VtensorsError where the kernel chooses or weighs otherwise than the reference; equal logits included."""
    angles = torch.linspace(-3, 3, 9 * experts, dtype=torch.float64) * 1e4
    logits = angles.cos().reshape(9, experts) * 8
    logits[1] = 0.25  # all equal
    logits[2] = logits[2].round()
    logits[3, ::2] = float("-inf")
    if (experts + 1) // 2 > experts - k:
        logits[3] = logits[2].flip(0)  # so many of -inf would be chosen that nothing could be told
    logits = logits.to(dtype)
    wanted, wanted_weights = router_topk(logits, k)
    chosen, weights = RouterTopk(k, dtype, device)(logits.to(device))
    if not torch.equal(chosen.cpu().long(), wanted):
        raise VtensorsError("the self-test failed: the router kernel chooses other experts")
    error = float((weights.cpu() - wanted_weights).abs().max())
    if not error <= _TOLERANCE:
        raise VtensorsError(
            "the self-test failed: weights of the router kernel",
            seen=f"{error:.1e} off",
            accepted=f"{_TOLERANCE}",
        )
