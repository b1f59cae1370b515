"""Recipes: which modules become which scheme. Built-in ones by name, others from a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from vtensors.errors import RequestError
from vtensors.matching import Entry, regex_entry
from vtensors.strict_json import parse_json

# What nvidia-modelopt 0.47 leaves alone by default (quantization/config.py, the default disabled quantizers),
# and what is no part of the text model's linear layers.
DEFAULT_IGNORE = (
    "re:.*(embed_tokens|embeddings?|wte|tok_embeddings|pos_embed|embed_positions)$",
    "re:.*norm[^.]*$",
    "re:.*conv1d$",
    "re:.*in_proj_(a|b|ba)$",
    "re:.*(router|block_sparse_moe\\.gate|mlp\\.gate|shared_expert_gate)(\\..*)?$",
    "re:.*lm_head$",
    "re:(.*\\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\\..*",
    "re:(.*\\.)?mtp\\..*",
)
LINEAR = "Linear"
_OPTIONS = ("mse", "four_over_six")
_MLP = ("re:.*\\.mlp\\.(.*\\.)?(gate|up|down)_proj$", "re:.*lm_head$")
_ATTENTION = (
    "re:.*\\.self_attn\\.(q|k|v|o)_proj$",
    "re:.*\\.linear_attn\\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj)$",
)


@attrs.frozen(kw_only=True)
class Rule:
    """Modules that become one scheme. targets: exact names, `re:` patterns (anchored at the start), or `Linear`
    for every matrix. mse, four_over_six: as in `EncodeOptions`; None = as the command says."""

    targets: tuple[str, ...]
    scheme: str
    mse: bool | None = None
    four_over_six: bool | None = None


@attrs.frozen(kw_only=True)
class Recipe:
    """Rules in order, the first that names a module decides; ignored modules are left as they are."""

    name: str
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = DEFAULT_IGNORE

    def entries(self) -> tuple[tuple[Rule, tuple[Entry, ...]], ...]:
        """The rules with their compiled targets. Raises DeclarationError for a pattern that is none."""
        return tuple(
            (rule, tuple(regex_entry(text, f"recipe {self.name}") for text in rule.targets))
            for rule in self.rules
        )

    def ignored(self) -> tuple[Entry, ...]:
        """The compiled ignore list."""
        return tuple(regex_entry(text, f"recipe {self.name}: ignore") for text in self.ignore)


def _uniform(name: str, scheme: str) -> Recipe:
    return Recipe(name=name, rules=(Rule(targets=(LINEAR,), scheme=scheme),))


BUILTIN: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _uniform("nvfp4", "nvfp4"),
        _uniform("fp8-tensor", "fp8-tensor"),
        _uniform("fp8-row", "fp8-row"),
        _uniform("fp8-block", "fp8-block"),
        _uniform("mxfp8", "mxfp8"),
        # The layout of nvidia/Qwen3.6-27B-NVFP4: MLP and head in 4 bits, attention in 8.
        Recipe(
            name="nvfp4-mlp-fp8-attention",
            rules=(Rule(targets=_MLP, scheme="nvfp4"), Rule(targets=_ATTENTION, scheme="fp8-tensor")),
            ignore=tuple(text for text in DEFAULT_IGNORE if "lm_head" not in text),
        ),
    )
}


def load_recipe(text: str) -> Recipe:
    """A built-in recipe by name, or one from a JSON file.

    The file: `{"rules": [{"targets": [...], "scheme": "nvfp4"}], "ignore": [...]}`, or the list of rules alone,
    with the default ignore list. Raises RequestError for an unknown name, key or type.
    """
    if text in BUILTIN:
        return BUILTIN[text]
    path = Path(text)
    if not path.is_file():
        raise RequestError(
            "no such recipe",
            seen=text,
            accepted=f"{', '.join(BUILTIN)}, or the path of a JSON file",
            fix="name one of these",
        )
    try:
        data = path.read_bytes()
    except OSError as cause:
        raise RequestError(
            f"the recipe cannot be read: {cause.strerror or cause}",
            file=text,
            accepted="a readable JSON file",
            fix="correct the path or its permissions",
        ) from cause
    value = parse_json(data, file=text, what="recipe", error=RequestError)
    whole: Mapping[str, Any] = value if isinstance(value, Mapping) else {"rules": value}
    _known(whole, ("rules", "ignore", "name"), text)
    rules = whole.get("rules")
    if not isinstance(rules, list) or not rules:
        raise RequestError(
            "the recipe has no rules",
            file=text,
            seen="none",
            accepted='[{"targets": [...], "scheme": ...}]',
            fix="add a rule for the modules to quantize",
        )
    return Recipe(
        name=path.stem,
        rules=tuple(_rule(rule, f"{text}: rule {number}") for number, rule in enumerate(rules)),
        ignore=_texts(whole, "ignore", text) if "ignore" in whole else DEFAULT_IGNORE,
    )


def _rule(value: Any, where: str) -> Rule:
    if not isinstance(value, Mapping):
        raise RequestError(
            "the rule is not an object",
            file=where,
            seen=repr(value)[:80],
            accepted='{"targets": ["re:.*mlp.*"], "scheme": "nvfp4"}',
            fix="correct the recipe",
        )
    _known(value, ("targets", "scheme", *_OPTIONS), where)
    scheme = value.get("scheme")
    targets = _texts(value, "targets", where)
    if not isinstance(scheme, str) or not targets:
        raise RequestError(
            "the rule needs targets and a scheme",
            file=where,
            seen=str(dict(value))[:80],
            accepted='{"targets": ["re:.*mlp.*", "lm_head"], "scheme": "nvfp4"}',
            fix="correct the recipe",
        )
    for key in _OPTIONS:
        if not isinstance(value.get(key), bool | None):
            raise RequestError(
                f"{key} is not true or false",
                file=where,
                seen=repr(value[key]),
                accepted="true or false",
                fix="correct the recipe",
            )
    return Rule(
        targets=targets, scheme=scheme, mse=value.get("mse"), four_over_six=value.get("four_over_six")
    )


def _texts(value: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    found = value.get(key, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise RequestError(
            f"{key} is not a list of strings",
            file=where,
            seen=repr(found)[:80],
            accepted='["re:.*mlp.*", "lm_head"]',
            fix="correct the recipe",
        )
    return tuple(found)


def _known(value: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    strange = sorted(set(value) - set(keys))
    if strange:
        raise RequestError(
            f"unknown key '{strange[0]}'",
            file=where,
            seen=", ".join(strange),
            accepted=", ".join(keys),
            fix="correct the recipe",
        )
