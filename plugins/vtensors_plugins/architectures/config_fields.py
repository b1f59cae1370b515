"""Fields of config.json by name: a missing or impossible one is an error, never a default. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from vtensors.counts import counted
from vtensors.errors import ArchitectureError
from vtensors_plugins.architectures.decoder_config import Llama3Scaling, RopeConfig

# Bounds on what config.json may ask to be planned. Published models have at most 200 layers, 30,000 experts and
# sizes below 2^31 (tensor dimensions and positions alike).
MAX_LAYERS = 1_000
MAX_EXPERTS = 100_000  # of all layers together
MAX_SIZE = 2**31 - 1
MAX_NUMBER = 1e30


@attrs.frozen
class Fields:
    """The text model's part of config.json (`text_config` where nested, else the whole).

    top: the whole file. text: the part. where: how messages call the part.
    """

    top: Mapping[str, Any]
    text: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fields:
        """The fields of a config.json dictionary."""
        nested = config.get("text_config")
        if isinstance(nested, Mapping):
            return cls(config, nested, "config.json: text_config")
        return cls(config, config, "config.json")

    def whole(self, name: str, *, multiple_of: str | None = None, at_most: int = MAX_SIZE) -> int:
        """A whole number above zero, a multiple of another field where named. Raises ArchitectureError."""
        value = self._required(self.text, name)
        if type(value) is not int or not 0 < value <= at_most:
            raise self.refusal(name, _short(value), f"a whole number from 1 to {at_most}")
        if multiple_of is not None and value % (divisor := self.whole(multiple_of)):
            raise self.refusal(name, _short(value), f"a multiple of {multiple_of} = {divisor}")
        return value

    def layers(self) -> int:
        """`num_hidden_layers`. Raises ArchitectureError."""
        return self.whole("num_hidden_layers", at_most=MAX_LAYERS)

    def number(self, name: str) -> float:
        """A number above zero. Raises ArchitectureError naming the field."""
        return self._positive(self.text, name)

    def flag(self, name: str) -> bool:
        """True or False; a flag that is not there is off. Raises ArchitectureError on anything else."""
        value = self.text.get(name)
        if value is not None and type(value) is not bool:
            raise self.refusal(name, _short(value), "true or false")
        return bool(value)

    def tied(self) -> bool:
        """Whether `tie_word_embeddings` is true at the top level or in the text part."""
        found = [owner.get("tie_word_embeddings") for owner in (self.top, self.text)]
        for value in found:
            if value is not None and type(value) is not bool:
                raise self.refusal("tie_word_embeddings", _short(value), "true or false")
        return True in found

    def only(self, name: str, *accepted: object) -> None:
        """Raises ArchitectureError if the field is there with a value that is not accepted."""
        value = self.text.get(name, accepted[0])
        if value not in accepted:
            raise self.refusal(name, _short(value), " or ".join(repr(item) for item in accepted))

    def layer_kinds(self, *accepted: str) -> tuple[str, ...]:
        """`layer_types`, one accepted kind for each of `num_hidden_layers`.

        Without them `full_attention_interval` n says that every n-th layer is of the last accepted kind
        (transformers 5.24 models/qwen3_5/configuration_qwen3_5.py).
        """
        count = self.layers()
        if self.text.get("layer_types") is None and self.text.get("full_attention_interval") is not None:
            step = self.whole("full_attention_interval")
            return tuple(accepted[-1 if number % step == 0 else 0] for number in range(1, count + 1))
        kinds = self._required(self.text, "layer_types")
        if not isinstance(kinds, list | tuple) or len(kinds) != count:
            is_list = isinstance(kinds, list | tuple)
            seen = counted(len(kinds), "entry", "entries") if is_list else _short(kinds)
            wanted = f"a list of {counted(count, 'entry', 'entries')} (num_hidden_layers)"
            raise self.refusal("layer_types", seen, wanted)
        for index, kind in enumerate(kinds):
            if kind not in accepted:
                raise self.refusal(f"layer_types[{index}]", _short(kind), " or ".join(accepted))
        return tuple(kinds)

    def rope(self, head_dim: int, *, partial: bool) -> RopeConfig:
        """The rotary embedding; its fields may stand in `rope_parameters`, `rope_scaling` or beside them.

        partial: the family turns only a part of each head, so that `partial_rotary_factor` is required.
        Raises ArchitectureError on a rope type other than `default` and `llama3`.
        """
        inner = self._rope_fields()
        merged = {**self.text, **inner}
        kind = inner.get("rope_type", "default")
        if kind not in ("default", "llama3"):
            raise self.refusal("rope_type", _short(kind), "'default' or 'llama3'")
        if partial or merged.get("partial_rotary_factor") is not None:
            share = self._positive(merged, "partial_rotary_factor")
        else:
            share = 1.0
        dim = int(head_dim * share)
        if not 0 < dim <= head_dim or dim % 2:
            seen = f"{share!r} of {head_dim} dimensions"
            raise self.refusal("partial_rotary_factor", seen, "an even number of dimensions of each head")
        return RopeConfig(
            dim=dim,
            theta=self._positive(merged, "rope_theta"),
            llama3=self._llama3(inner) if kind == "llama3" else None,
        )

    def _rope_fields(self) -> Mapping[str, Any]:
        """What stands in `rope_parameters` and `rope_scaling`, with the older `type` as `rope_type`.

        Readers differ in which of the two they follow, so a field that has two values is refused.
        """
        found: dict[str, Any] = {}
        for name in ("rope_parameters", "rope_scaling"):
            fields = self.text.get(name) or {}
            if not isinstance(fields, Mapping):
                raise self.refusal(name, _short(fields), "an object")
            kind = fields.get("rope_type", fields.get("type", "default"))
            for field, value in {**fields, "rope_type": kind}.items() if fields else ():
                if isinstance(value, Mapping):
                    raise self.refusal(
                        f"{name}.{field}", _short(value), "one rotary embedding for all layers"
                    )
                if field != "type" and found.setdefault(field, value) != value:
                    seen = f"{_short(found[field])} in rope_parameters, {_short(value)} in rope_scaling"
                    raise self.refusal(field, seen, "one value")
        return found

    def refusal(self, name: str, seen: str, accepted: str) -> ArchitectureError:
        """The error for a field with a value that cannot be served."""
        return ArchitectureError(
            f"{name} is not supported",
            file=self.where,
            seen=f"{name} = {seen}",
            accepted=accepted,
            fix=f"correct {self.where} if it is wrong; what is not supported here needs a plugin",
        )

    def _llama3(self, inner: Mapping[str, Any]) -> Llama3Scaling:
        return Llama3Scaling(
            factor=self._positive(inner, "factor"),
            low_freq_factor=self._positive(inner, "low_freq_factor"),
            high_freq_factor=self._positive(inner, "high_freq_factor"),
            original_positions=int(self._positive(inner, "original_max_position_embeddings")),
        )

    def _positive(self, owner: Mapping[str, Any], name: str) -> float:
        value = self._required(owner, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self.refusal(name, _short(value), "a number above zero")
        return float(value)

    def _required(self, owner: Mapping[str, Any], name: str) -> Any:
        value = owner.get(name)
        if value is None:
            raise ArchitectureError(
                f"{name} is missing",
                file=self.where,
                fix=f"add {name} to config.json as the publisher gives it; defaults are not assumed",
            )
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
