"""Fields of config.json by name: a missing or impossible one is an error, never a default. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from vtensors.errors import ArchitectureError
from vtensors_plugins.architectures.decoder_config import Llama3Scaling, RopeConfig


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

    def whole(self, name: str, *, multiple_of: str | None = None) -> int:
        """A whole number above zero, a multiple of another field where named. Raises ArchitectureError."""
        value = self._required(self.text, name)
        if type(value) is not int or value <= 0:
            raise self.refusal(name, repr(value), "a whole number above zero")
        if multiple_of is not None and value % (divisor := self.whole(multiple_of)):
            raise self.refusal(name, repr(value), f"a multiple of {multiple_of} = {divisor}")
        return value

    def number(self, name: str) -> float:
        """A number above zero. Raises ArchitectureError naming the field."""
        return self._positive(self.text, name)

    def flag(self, name: str) -> bool:
        """True or False; a flag that is not there is off. Raises ArchitectureError on anything else."""
        value = self.text.get(name)
        if value is not None and type(value) is not bool:
            raise self.refusal(name, repr(value), "true or false")
        return bool(value)

    def tied(self) -> bool:
        """Whether `tie_word_embeddings` is true at the top level or in the text part."""
        return any(owner.get("tie_word_embeddings") is True for owner in (self.top, self.text))

    def only(self, name: str, *accepted: object) -> None:
        """Raises ArchitectureError if the field is there with a value that is not accepted."""
        value = self.text.get(name, accepted[0])
        if value not in accepted:
            raise self.refusal(name, repr(value), " or ".join(repr(item) for item in accepted))

    def layer_kinds(self, *accepted: str) -> tuple[str, ...]:
        """`layer_types`, one accepted kind for each of `num_hidden_layers`."""
        count, kinds = self.whole("num_hidden_layers"), self._required(self.text, "layer_types")
        if not isinstance(kinds, list | tuple) or len(kinds) != count:
            seen = f"{len(kinds)} entries" if isinstance(kinds, list | tuple) else repr(kinds)
            raise self.refusal("layer_types", seen, f"a list of {count} (num_hidden_layers) entries")
        for index, kind in enumerate(kinds):
            if kind not in accepted:
                raise self.refusal(f"layer_types[{index}]", repr(kind), " or ".join(accepted))
        return tuple(kinds)

    def rope(self, head_dim: int, *, partial: bool) -> RopeConfig:
        """The rotary embedding; its fields may stand in `rope_parameters`, `rope_scaling` or beside them.

        partial: the family turns only a part of each head, so that `partial_rotary_factor` is required.
        Raises ArchitectureError on a rope type other than `default` and `llama3`.
        """
        inner = self.text.get("rope_parameters") or self.text.get("rope_scaling") or {}
        if not isinstance(inner, Mapping):
            raise self.refusal("rope_parameters", repr(inner), "an object")
        merged = {**self.text, **inner}
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise self.refusal("rope_type", repr(kind), "'default' or 'llama3'")
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

    def refusal(self, name: str, seen: str, accepted: str) -> ArchitectureError:
        """The error for a field with a value that cannot be served."""
        return ArchitectureError(
            f"{name} is not supported", file=self.where, seen=f"{name} = {seen}", accepted=accepted
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
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.refusal(name, repr(value), "a number above zero")
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
