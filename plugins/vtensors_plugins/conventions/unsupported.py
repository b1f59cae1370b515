"""Conventions that are recognized and refused by name, so that nobody takes them for something else."""

from __future__ import annotations

from vtensors.configs import ConfigFiles
from vtensors.errors import DeclarationError
from vtensors.hookspecs import hookimpl
from vtensors.records import (
    Claim,
    ClaimRequest,
    Convention,
    Declaration,
    PluginInfo,
    Refusal,
    TensorSource,
    Weight,
)

# quant_method in lower case -> what people call it.
METHODS: dict[str, str] = {
    "gptq": "GPTQ (INT4 / INT8 groups with zero points)",
    "awq": "AWQ INT4",
    "bitsandbytes": "bitsandbytes (NF4, FP4, INT8)",
    "gguf": "GGUF",
    "mxfp4": "MXFP4 (gpt-oss blocks and scales)",
    "fbgemm_fp8": "FBGEMM FP8 with an activation bound",
    "nvfp4": "transformers' online NVFP4 (not a stored form)",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "higgs": "HIGGS",
    "eetq": "EETQ INT8",
    "quanto": "Quanto",
    "torchao": "torchao",
    "quark": "AMD Quark",
    "auto-round": "AutoRound",
    "intel/auto-round": "AutoRound",
    "bitnet": "BitNet",
    "fp_quant": "FP-Quant",
    "exl2": "EXL2",
    "exl3": "EXL3",
}
# A suffix that only this convention has -> its name, for files without a declaration.
SIGNATURES: dict[str, str] = {
    "qweight": "GPTQ or AWQ INT4",
    "qzeros": "GPTQ or AWQ INT4",
    "g_idx": "GPTQ",
    "absmax": "bitsandbytes",
    "weight.absmax": "bitsandbytes",
    "gate_up_proj_blocks": "MXFP4 (gpt-oss)",
    "down_proj_blocks": "MXFP4 (gpt-oss)",
    "blocks": "MXFP4 (gpt-oss)",
    "weight_zero_point": "an asymmetric integer scheme",
}


def declare(configs: ConfigFiles) -> Declaration | None:
    """Refuses a quant_method that is known and not supported; None otherwise."""
    for block in configs.blocks():
        method = block.quant_method
        if method in METHODS:
            raise DeclarationError(
                f"{METHODS[method]} is recognized but not supported",
                file=block.where,
                seen=f"quant_method {block.values['quant_method']!r}",
                accepted="modelopt, compressed-tensors, fp8, or no quantization_config",
                fix="install a plugin that reads it, or write one: docs/writing-a-plugin.md",
            )
    return None


def claim(request: ClaimRequest) -> list[Claim | Refusal]:
    """No claims; a reason for groups whose tensor names only an unsupported convention has."""
    answers: list[Claim | Refusal] = []
    for group in request.groups:
        known = next((SIGNATURES[suffix] for suffix in group.tensors if suffix in SIGNATURES), None)
        if known is not None:
            reason = f"looks like {known}, which is recognized but not supported; a plugin can add it"
            answers.append(Refusal(module=group.module, reason=reason))
    return answers


def read(claim: Claim, source: TensorSource) -> Weight:
    """Never called: nothing is claimed."""
    raise DeclarationError(
        "this convention cannot be read",
        tensor=claim.module,
        seen=claim.form.formula,
        accepted="the conventions that `vtensors conventions` lists",
        fix="export the checkpoint in a convention that is read",
    )


CONVENTION = Convention(
    name="unsupported",
    summary="Recognizes GPTQ, AWQ, bitsandbytes, GGUF, MXFP4 and others, and refuses them by name.",
    forms=(),
    declare=declare,
    read=read,
    claim=claim,
    quant_methods=(),
)


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """This plugin."""
    return PluginInfo(name="unsupported", summary=CONVENTION.summary)


@hookimpl
def vtensors_conventions() -> list[Convention]:
    """The `unsupported` convention."""
    return [CONVENTION]
