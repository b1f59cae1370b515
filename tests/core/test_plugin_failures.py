"""What a plugin does wrong after it was loaded stays with it: the others go on, and the message names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

import vtensors
from fake_plugins import candidate, module
from vtensors._lazy import BUILTIN_PLUGINS
from vtensors.checkpoint import Checkpoint
from vtensors.errors import ArchitectureError, PluginError, VtensorsError
from vtensors.manager import Plugins
from vtensors.records import Architecture, Claim, ClaimRequest, Convention, Declaration, Refusal
from vtensors_engine.bundled import bundled_checkpoint
from vtensors_engine.loading import load_model
from vtensors_plugins.conventions import plain

NAME = "model.embed_tokens"
FAILURES = [KeyError, SystemExit, RecursionError]


def failing(kind: type[BaseException]) -> Callable[..., Any]:
    def fail(*_arguments: object) -> Any:
        raise kind("boom")

    return fail


def plugins_with(**hooks: Callable[..., Any]) -> Plugins:
    """The built-in plugins and one of a third party, `bad`, with the hooks given (without `vtensors_`)."""
    named = {f"vtensors_{hook}": function for hook, function in hooks.items()}
    return Plugins.discover(
        builtins=BUILTIN_PLUGINS, third_parties=[candidate("bad", module("bad", named))], environ={}
    )


def opened(**hooks: Callable[..., Any]) -> Checkpoint:
    checkpoint = vtensors.open_checkpoint(bundled_checkpoint(), plugins=plugins_with(**hooks))
    checkpoint.check()
    return checkpoint


def with_convention(**fields: Any) -> Checkpoint:
    record = Convention(
        **{
            "name": "bad-words",
            "summary": "Spells badly.",
            "forms": (),
            "declare": lambda configs: None,
            "read": failing(KeyError),
            **fields,
        }
    )
    return opened(conventions=lambda: [record])


def with_architecture(**fields: Any) -> Checkpoint:
    record = Architecture(
        **{
            "name": "bad-model",
            "summary": "Builds badly.",
            "model_types": ("bad",),
            "matches": lambda config: False,
            "plan": failing(KeyError),
            "build": "nowhere:build",
            **fields,
        }
    )
    return opened(architectures=lambda: [record])


def declared(**fields: Any) -> Any:
    return lambda configs: Declaration(
        **{"convention": "bad-words", "scheme_of": lambda name: None, "summary": "bad", **fields}
    )


def changed(**changes: Any) -> Callable[[ClaimRequest], list[Claim | Refusal]]:
    """Claims on every plain module as `plain` makes them, changed."""

    def claim(request: ClaimRequest) -> list[Claim | Refusal]:
        own = [answer for answer in plain.claim(request) if isinstance(answer, Claim)]
        return [attrs.evolve(answer, **{"convention": "bad-words", **changes}) for answer in own]

    return claim


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("part", ["declare", "claim"])
def test_a_convention_that_fails_is_left_out_by_name(kind: type[BaseException], part: str) -> None:
    checkpoint = with_convention(**{part: failing(kind)})
    (warning,) = (text for text in checkpoint.warnings if "bad-words" in text)
    assert kind.__name__ in warning
    assert "bad-dist" in warning
    assert checkpoint.read(NAME).shape == (2048, 256)


@pytest.mark.parametrize("kind", FAILURES)
def test_an_architecture_that_fails_to_say_is_left_out_by_name(kind: type[BaseException]) -> None:
    checkpoint = with_architecture(matches=failing(kind))
    (warning,) = (text for text in checkpoint.warnings if "bad-model" in text)
    assert kind.__name__ in warning
    assert checkpoint.architecture is not None
    assert checkpoint.architecture.name == "qwen3_5"


def test_two_architectures_that_know_a_model_are_refused_by_name() -> None:
    with pytest.raises(ArchitectureError, match=r"bad-model \(bad-dist\)"):
        with_architecture(matches=lambda config: True)


@pytest.mark.parametrize("plan", [failing(KeyError), failing(SystemExit), lambda config, names: 3])
def test_an_architecture_that_gives_no_plan_is_refused_by_name(plan: Any, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bad"}')
    (tmp_path / "model.safetensors").write_bytes((bundled_checkpoint() / "model.safetensors").read_bytes())
    record = Architecture(
        name="bad-model",
        summary="Builds badly.",
        model_types=("bad",),
        matches=lambda config: config["model_type"] == "bad",
        plan=plan,
        build="nowhere:build",
    )
    plugins = plugins_with(architectures=lambda: [record])
    with pytest.raises(PluginError, match=r"'bad-model'.* of plugin 'bad' \(bad-dist\)"):
        vtensors.open_checkpoint(tmp_path, plugins=plugins).check()


@pytest.mark.parametrize(
    "fields",
    [{"conflicts": 3}, {"warnings": (1,)}, {"matchers": ("a",)}, {"kv_cache": "FP8"}, {"scheme_of": None}],
)
def test_a_declaration_of_something_else_is_left_out_by_name(fields: dict[str, Any]) -> None:
    (warning,) = (t for t in with_convention(declare=declared(**fields)).warnings if "bad-words" in t)
    assert next(iter(fields)) in warning


@pytest.mark.parametrize("answer", [failing(KeyError), failing(SystemExit), lambda name: "nvfp4"])
def test_a_scheme_of_that_fails_is_silent_after_one_warning(answer: Any, caplog: Any, tmp_path: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes((bundled_checkpoint() / "model.safetensors").read_bytes())
    record = Convention(
        name="bad-words",
        summary="Spells badly.",
        forms=(),
        declare=declared(scheme_of=answer),
        read=failing(KeyError),
    )
    # Without a config.json nothing else is declared, so it is asked about every module.
    plugins = plugins_with(conventions=lambda: [record])
    checkpoint = vtensors.open_checkpoint(tmp_path, plugins=plugins)
    assert checkpoint.modules[NAME].declared_scheme is None
    assert [record.getMessage().count("bad-dist") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"convention": "plain"},
        {"module": 1},
        {"scheme": None},
        {"shape": [1, 2]},
        {"form": None},
        {"part": 0},
        {"declared": "FP8"},
        {"roles": {}},
    ],
    ids=str,
)
def test_claims_that_are_no_claims_are_left_out_by_name(changes: dict[str, Any]) -> None:
    checkpoint = with_convention(claim=changed(**changes), overrides=("plain",))
    (warning,) = (text for text in checkpoint.warnings if "bad-words" in text)
    assert f"as its {next(iter(changes))}" in warning
    assert checkpoint.modules[NAME].convention == "plain"


def other_shape(claim: Claim, source: Any) -> Any:
    return plain.read(claim, source).rows(0, 1)


@pytest.mark.parametrize(
    ("read", "seen"),
    [
        (failing(KeyError), "KeyError: 'boom'"),
        (failing(SystemExit), "SystemExit: boom"),
        (lambda claim, source: None, "NoneType"),
        (other_shape, r"gave bf16 \[1, 256\] for a claim on bf16 \[2048, 256\]"),
    ],
)
def test_a_reader_that_fails_or_gives_another_weight_is_refused_by_name(read: Any, seen: str) -> None:
    checkpoint = with_convention(claim=changed(), read=read, overrides=("plain",))
    with pytest.raises(PluginError, match=seen) as caught:
        checkpoint.read(NAME)
    assert NAME in str(caught.value)
    assert "bad-dist" in str(caught.value)


def test_what_a_reader_refuses_on_purpose_passes_as_it_is() -> None:
    class Refused(VtensorsError):
        pass

    checkpoint = with_convention(claim=changed(), read=failing(Refused), overrides=("plain",))
    with pytest.raises(Refused):
        checkpoint.read(NAME)


@pytest.mark.parametrize("kind", FAILURES)
def test_observers_that_leave_do_not_take_the_load_with_them(kind: type[BaseException]) -> None:
    plugins = plugins_with(selected=lambda record: failing(kind)(), progress=lambda event: failing(kind)())
    assert load_model(bundled_checkpoint(), "cpu", plugins=plugins).vocab_size == 2048
