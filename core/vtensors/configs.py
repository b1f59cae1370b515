"""The configuration files of a checkpoint and the quantization blocks found in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from vtensors.errors import DeclarationError

CONFIG = "config.json"
HF_QUANT = "hf_quant_config.json"
BLOCK_KEYS = ("quantization_config", "compression_config")


@attrs.frozen(kw_only=True)
class QuantizationBlock:
    """One quantization block. where: file and key; values: the block; text_only: found inside text_config."""

    where: str
    values: Mapping[str, Any]
    text_only: bool = False

    @property
    def quant_method(self) -> str | None:
        """`quant_method` in lower case, None when the key is absent or null."""
        method = self.values.get("quant_method")
        if method is not None and not isinstance(method, str):
            raise DeclarationError(
                "quant_method is not a string",
                file=self.where,
                seen=repr(method),
                accepted="a method name",
                fix="correct the configuration file, or use the one that belongs to the weights",
            )
        return method.lower() if method is not None else None


@attrs.frozen(kw_only=True)
class ConfigFiles:
    """config.json and hf_quant_config.json as dictionaries; None where the file is absent."""

    config: Mapping[str, Any] | None = None
    hf_quant: Mapping[str, Any] | None = None

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of config.json: `text_config` where nested, else the whole."""
        config = self.config or {}
        nested = config.get("text_config")
        return nested if isinstance(nested, Mapping) else config

    @property
    def dtype(self) -> Any:
        """What config.json names as the model's dtype, None where it names none.

        The key is `dtype`, before transformers 4.56 `torch_dtype`; it stands in either part of a nested file.
        """
        owners = (self.text, self.config or {})
        return next(
            (owner[key] for owner in owners for key in ("dtype", "torch_dtype") if owner.get(key)), None
        )

    def blocks(self) -> tuple[QuantizationBlock, ...]:
        """Every non-null quantization block of config.json, top level first.

        Errors: a block that is not an object; an empty object (it names no method).
        """
        found = []
        config = self.config or {}
        nested = config.get("text_config")
        for where, owner in ((CONFIG, config), (f"{CONFIG}: text_config", nested)):
            if not isinstance(owner, Mapping):
                continue
            for key in BLOCK_KEYS:
                values = owner.get(key)
                if values is None:
                    continue
                place = f"{where}{'.' if 'text' in where else ': '}{key}"
                if not isinstance(values, Mapping):
                    raise DeclarationError(
                        f"{key} is not an object",
                        file=place,
                        seen=repr(values)[:80],
                        accepted="an object or null",
                        fix="correct the configuration file, or use the one that belongs to the weights",
                    )
                found.append(
                    QuantizationBlock(where=place, values=values, text_only=owner is nested is not config)
                )
        return tuple(found)

    def only_text_is_declared(self) -> bool:
        """Whether everything that declares a quantization stands inside text_config."""
        blocks = self.blocks()
        return bool(blocks) and self.hf_quant is None and all(block.text_only for block in blocks)

    def hf_quantization(self) -> QuantizationBlock | None:
        """The `quantization` object of hf_quant_config.json, or None when the file is absent."""
        if self.hf_quant is None:
            return None
        values = self.hf_quant.get("quantization", self.hf_quant)
        if not isinstance(values, Mapping):
            raise DeclarationError(
                "quantization is not an object",
                file=HF_QUANT,
                seen=repr(values)[:80],
                accepted="an object",
                fix="correct the configuration file, or use the one that belongs to the weights",
            )
        # The writer puts its own name and version beside the object, not into it.
        producer = {"producer": self.hf_quant["producer"]} if "producer" in self.hf_quant else {}
        return QuantizationBlock(where=f"{HF_QUANT}: quantization", values={**producer, **values})


def string_list(values: Mapping[str, Any], key: str, where: str) -> list[str]:
    """The list of strings under key, [] when absent or null; anything else is a DeclarationError."""
    entries = values.get(key)
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise DeclarationError(
            f"{key} is not a list of strings",
            file=where,
            seen=repr(entries)[:80],
            accepted="a list of strings",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    return entries
