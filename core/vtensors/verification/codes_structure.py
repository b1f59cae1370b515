"""Codes about files, headers, the index, declarations and what a load refuses before it reads a weight."""

from __future__ import annotations

from vtensors.verification.code import ERROR, WARNING, Code, rows

AGAIN = "download the file again"
EXPORT = "export or quantize the model again"

_FILES = rows(
    ERROR,
    ("missing-file", "the index names a file that is not there", "every file of the index", AGAIN),
    (
        "broken-link",
        "a file is a link to nothing, or one that leaves the checkpoint",
        "the file itself, or a link of the Hub cache into its blobs folder",
        "copy the files with their targets (cp -L)",
    ),
    ("truncated-file", "bytes are missing at the end of a file", "the size that its header implies", AGAIN),
    ("trailing-bytes", "bytes follow the last tensor of a file", "the size that its header implies", AGAIN),
    ("damaged-header", "a file's header cannot be read, or contradicts itself", "a safetensors file", AGAIN),
    ("damaged-index", "the index cannot be read, or names impossible files", "a weight_map", AGAIN),
    (
        "index-differs",
        "index and headers disagree about where a tensor is",
        "an index that names each tensor's file",
        "index and files come from different exports: download all of them again",
    ),
    (
        "duplicate-tensor",
        "two files hold a tensor of one name",
        "one copy",
        "the files come from different exports: download all of them again",
    ),
    (
        "ambiguous-files",
        "several weight files and nothing says which are the checkpoint",
        "an index, model.safetensors, or one file",
        "download model.safetensors.index.json too, or verify one file by its own path",
    ),
    ("unreadable-tensor", "the bytes of a tensor could not be read", "a readable file", AGAIN),
    (
        "content-differs",
        "the content of a file does not have the hash under which the Hub stored it (--hash)",
        "content whose hash is the blob's name",
        "something wrote into the cache: delete the blob and download it again",
    ),
)
_READING = rows(
    ERROR,
    ("damaged-config", "a configuration file is not one JSON object", "a JSON object", AGAIN),
    (
        "refused-declaration",
        "the quantization that the configuration declares is unknown or impossible",
        "a declaration that a registered convention reads",
        "correct the configuration, or install a plugin that reads it",
    ),
    (
        "refused-model",
        "the architecture that knows this model refuses its configuration or names",
        "a configuration inside of the family",
        "correct config.json, or use the one that belongs to the weights",
    ),
    (
        "unscaled-fp8",
        "an FP8 weight without a scale that any convention knows",
        "a scale beside it (weight_scale, weight_scale_inv)",
        "fetch or restore the scale: its values are meaningless without one",
    ),
    (
        "undeclared-quantization",
        "tensors look quantized, but no configuration file declares it",
        "quantization_config in config.json, or hf_quant_config.json",
        "fetch the file that declares them",
    ),
    (
        "claimed-twice",
        "two conventions read the same tensors",
        "one reader",
        "set VT_PREFER=<plugin>, or deny one with VT_PLUGINS=-<plugin>",
    ),
    (
        "unread-tensor",
        "no convention reads a tensor, and nothing waives it",
        "a form of docs/conventions.md",
        "export the model in a supported form, or add a convention plugin",
    ),
    (
        "repeated-tensor",
        "two tensors give the same part of the model",
        "one of them",
        "remove one copy of the tensors",
    ),
    (
        "missing-weight",
        "a weight that the model needs is not there",
        "every weight of the model",
        "fetch the whole checkpoint: a file or the tensor is missing",
    ),
    (
        "unexpected-tensor",
        "the model has no place for a tensor",
        "the weights of the model",
        "remove the tensor, or use the config.json that belongs to the weights",
    ),
    (
        "wrong-shape",
        "a weight's shape does not fit config.json",
        "the shape that config.json implies",
        "use the config.json that belongs to the weights",
    ),
    (
        "missing-bias",
        "config.json announces a bias that is not there",
        "the bias",
        "fetch the whole checkpoint, or correct config.json",
    ),
    (
        "unexpected-bias",
        "a bias that config.json denies",
        "no bias",
        "remove the tensor, or correct config.json",
    ),
    (
        "mixed-16-bit",
        "BF16 and F16 tensors in one model",
        "one 16-bit dtype",
        "save the checkpoint anew in one dtype: the bytes of the two cannot be told apart",
    ),
    (
        "missing-pre-scale",
        "the activation pre-scale is missing in some layers of a kind",
        "a pre-scale in all modules of one kind, or in none",
        "fetch the whole checkpoint, or export it again",
    ),
    ("kv-scale-dtype", "a KV-cache scale is not a float", "BF16, F16 or F32", EXPORT),
    ("refused", "a load refuses the checkpoint for another reason", "what the message says", EXPORT),
)
_DOUBTS = rows(
    WARNING,
    (
        "stray-file",
        "a weight file beside the checkpoint is not part of it",
        "only the files that are read",
        "remove it, so that no other program reads it",
    ),
    (
        "unknown-architecture",
        "no architecture plugin knows the model, so that missing weights cannot be noticed",
        "a model_type that a plugin knows",
        "install or write an architecture plugin",
    ),
    (
        "failed-convention",
        "a convention plugin failed and was left out",
        "a working plugin",
        "repair or upgrade the plugin",
    ),
    (
        "declared-differs",
        "the configuration says one thing, the tensors or another file another",
        "files that agree",
        "the tensors were followed; correct the configuration for programs that follow it",
    ),
    (
        "stale-entry",
        "an ignore or target entry matches no module",
        "entries that name modules of the checkpoint",
        "correct the name: the intent of the entry was not carried out",
    ),
    ("convention-note", "a convention's remark on the configuration", "a configuration without it", "see it"),
    (
        "missing-activation-scale",
        "quantized activations are declared, but the input scale is missing",
        "an input scale",
        "calibrate the module (an expert that saw no token has none); until then it runs otherwise",
    ),
    (
        "missing-kv-scale",
        "a quantized KV cache is declared, but a layer has no scales",
        "k_scale and v_scale in each attention layer",
        "nothing, if the cache was meant to be cast with a scale of 1.0; else calibrate it",
    ),
    (
        "lone-kv-scale",
        "a layer has k_scale or v_scale, not both",
        "both",
        "export the cache's scales again; until then the one serves both",
    ),
)

STRUCTURE_CODES: tuple[Code, ...] = (*_FILES, *_READING, *_DOUBTS)
