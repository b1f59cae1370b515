"""The only rightward edge of the import direction: names that resolve in other packages on first use."""

from __future__ import annotations

LAZY: dict[str, tuple[str, str | None]] = {
    "LLM": ("vtensors_engine.llm", "LLM"),
    "load_model": ("vtensors_engine.loading", "load_model"),
    "SamplingParams": ("vtensors_engine.sampling", "SamplingParams"),
    "testing": ("vtensors_plugins.testing", None),
}

# The built-in plugins, name -> module, in the order in which they are listed. They are registered as a third
# party's entry points are; the name is the one their `vtensors_plugin()` gives.
BUILTIN_PLUGINS: tuple[tuple[str, str], ...] = (
    ("schemes", "vtensors_plugins.schemes"),
    ("modelopt", "vtensors_plugins.conventions.modelopt"),
    ("compressed-tensors", "vtensors_plugins.conventions.compressed_tensors"),
    ("hf-fp8", "vtensors_plugins.conventions.hf_fp8"),
    ("plain", "vtensors_plugins.conventions.plain"),
    ("unsupported", "vtensors_plugins.conventions.unsupported"),
    ("qwen3_5", "vtensors_plugins.architectures.qwen3_5"),
    ("qwen3", "vtensors_plugins.architectures.qwen3"),
    ("llama", "vtensors_plugins.architectures.llama"),
    ("reference", "vtensors_plugins.backends.reference"),
    ("cuda", "vtensors_plugins.backends.cuda"),
    ("switches", "vtensors_plugins.switches"),
    ("commands", "vtensors_plugins.commands"),
    ("engine", "vtensors_engine.plugin"),
)
