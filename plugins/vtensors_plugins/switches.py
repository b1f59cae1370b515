"""The switches that the built-in plugins and the loader read."""

from __future__ import annotations

from vtensors.hookspecs import hookimpl
from vtensors.records import PluginInfo, Switch
from vtensors.switches import BOOT_SWITCHES

SWITCHES = (
    Switch(
        name="VT_MODELOPT_W4A4",
        kind="bool",
        default="0",
        summary=(
            "Run ModelOpt NVFP4 weights that have an input_scale with FP4 activations, "
            "W4A16_NVFP4 ones too (for comparison; warned)."
        ),
    ),
    Switch(
        name="VT_FP8_W8A8",
        kind="bool",
        default="0",
        summary="Run FP8 weights with the FP8 activations that the checkpoint declares.",
    ),
    Switch(
        name="VT_LMHEAD_QUANTIZED",
        kind="bool",
        default="1",
        summary="Keep a quantized lm_head quantized; 0 dequantizes it once at load to the model's dtype.",
    ),
    Switch(
        name="VT_MMAP",
        kind="bool",
        default="1",
        summary="Map files on a CPU and share their pages; 0 reads every weight into memory of its own.",
    ),
    Switch(
        name="VT_CACHE_DIR",
        kind="path",
        default="",
        summary=(
            "Where compiled kernels, their self-tests' verdicts and timings are kept; unset: "
            "$XDG_CACHE_HOME/vtensors, else ~/.cache/vtensors."
        ),
    ),
    Switch(
        name="VT_SELF_TEST_SECONDS",
        kind="seconds",
        default="60",
        summary=(
            "How long the self-test of a kernel may take on a GPU, what it compiles not counted, before the kernel is "
            "given up and never tried again on that card; 0 = no limit."
        ),
    ),
    Switch(
        name="VT_DEBUG_NAN",
        kind="bool",
        default="0",
        summary="Name the first layer whose output is not finite, as an error; every layer waits for the one before.",
    ),
    Switch(
        name="VT_KERNELS",
        kind="str",
        default="",
        summary=(
            "Kernels to use, as `scheme:kernel`, or to leave out, as `scheme:!kernel`, comma separated, with `*` "
            "where wanted: `nvfp4:linear_nvfp4_*,fp8-*:!linear_fp8_widening`; `vtensors kernels` lists them."
        ),
    ),
    Switch(
        name="VT_AUTOTUNE",
        kind="bool",
        default="0",
        summary="Time the kernels that could compute each shape on this card and take the fastest; times are kept.",
    ),
)


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """Who this plugin is."""
    return PluginInfo(name="switches", summary="The built-in VT_* switches.")


@hookimpl
def vtensors_switches() -> list[Switch]:
    """Every switch of the built-in plugins, the ones that choose plugins included."""
    return [*BOOT_SWITCHES, *SWITCHES]
