"""Every compiled form of every kernel: what is compiled for CI, disassembled, and listed in docs/kernel-forms.md."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import attrs

from vtensors.errors import RequestError
from vtensors_kernels.compiling.architectures import COMPILED
from vtensors_kernels.compiling.nvrtc import Toolkit, compile_source
from vtensors_kernels.compiling.sources import load_source

# Modules of this package that launch kernels; each has a tuple INSTANTIATIONS of what it may ask for.
LAUNCHERS: tuple[str, ...] = (
    "wideners",
    "nvfp4.repack",
    "nvfp4.packed_widening",
    "nvfp4.finish",
    "nvfp4.stored",
    "nvfp4.stream_launches",
    "nvfp4.staging",
    "nvfp4.wgmma",
    "nvfp4.wgmma_segments",
    "nvfp4.embedding",
    "nvfp4.quantize_activations",
    "nvfp4.block_scaled",
    "fp8.repack",
    "fp8.stream",
    "experts.compiled",
    "activation_quantizers.fp8",
    "activation_quantizers.linears",
    "plain.small",
    "steps.rms_norm",
    "steps.router",
    "steps.norm_router",
    "steps.next_token",
    "steps.sample_token",
    "steps.embedding_rows",
    "steps.paged_attention",
    "steps.paged_prefill",
    "steps.gated_delta_net",
)
# Features of the machine code that an instantiation may expect, and the targets whose hardware has each.
FEATURES: Mapping[str, tuple[str, ...]] = {
    "e2m1": ("sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"),  # cvt to and from E2M1
    "e4m3": ("sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"),  # cvt from E4M3
    "mma": COMPILED,  # mma.sync on 16-bit operands
    "wgmma": ("sm_90a",),
    "bulk_copy": ("sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"),  # cp.async.bulk
    "omma": ("sm_120a", "sm_121a"),  # mma.sync on block-scaled 4-bit operands
}


@attrs.frozen(kw_only=True)
class Instantiation:
    """One compiled form of a kernel.

    source: as `load_source` takes it. function: the name of its `extern "C"` kernel. defines: macros, as
    `compile_source` takes them. targets: what it is compiled for. hot: runs for every token, so that it may
    spill nothing on any target. expects: names of FEATURES that its machine code must have on every target of
    its own whose hardware has them; where that differs by target, there is one record per group of targets.
    shared_bytes: the most dynamic shared memory that a launch of it asks for.
    """

    source: str
    function: str
    defines: Mapping[str, int] = attrs.field(factory=dict)
    targets: tuple[str, ...] = COMPILED
    hot: bool = False
    expects: tuple[str, ...] = ()
    shared_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        """Raises RequestError for a target or feature that is not known."""
        for what, seen, known in (
            ("target", self.targets, COMPILED),
            ("feature", self.expects, tuple(FEATURES)),
        ):
            if unknown := [name for name in seen if name not in known]:
                raise RequestError(
                    f"{self.label} names an unknown {what}",
                    seen=", ".join(unknown),
                    accepted=", ".join(known),
                )

    @property
    def label(self) -> str:
        """The function with its macros in order of name: `linear_x M=8 F16=0`, the prefix `VT_` left out."""
        macros = (f"{name.removeprefix('VT_')}={self.defines[name]}" for name in sorted(self.defines))
        return " ".join((self.function, *macros))

    def features(self, target: str) -> tuple[str, ...]:
        """Which of the expected features the target's hardware has."""
        return tuple(name for name in self.expects if target in FEATURES[name])

    def compile(self, target: str, toolkit: Toolkit) -> bytes:
        """The cubin for that target. Raises CompileError as `compile_source` does."""
        return compile_source(load_source(self.source), target, self.defines, toolkit)


def all_instantiations() -> tuple[Instantiation, ...]:
    """What every launcher of the package may ask for, in order of LAUNCHERS. Imports them, and so torch."""
    package = __name__.partition(".")[0]
    found: list[Instantiation] = []
    for name in LAUNCHERS:
        found += importlib.import_module(f"{package}.{name}").INSTANTIATIONS
    return tuple(found)
