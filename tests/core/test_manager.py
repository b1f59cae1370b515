from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import attrs
import pluggy
import pytest

from fake_plugins import candidate, convention, conventions, discover, module, scheme, schemes, status_of
from vtensors.errors import PluginError, SwitchError
from vtensors.hookspecs import hookimpl
from vtensors.manager import Plugins
from vtensors.records import Command, PluginInfo, Progress, Selected, Switch

GOOD = candidate("good", module("good", schemes("int8")))


def assert_contained(plugins: Plugins, name: str, *words: str) -> None:
    """The plugin is quarantined for the reason given, and the good one beside it is unharmed."""
    status = status_of(plugins, name)
    assert status.state == "quarantined"
    for word in words:
        assert word in status.error
    assert list(plugins.registry.schemes) == ["int8"]
    assert status_of(plugins, "good").state == "active"
    assert [found.name for found in plugins.quarantined] == [name]


def test_records_are_collected_with_their_owner() -> None:
    plugins = discover(GOOD)
    owned = plugins.registry.schemes["int8"]
    assert (owned.record.name, owned.plugin, owned.distribution) == ("int8", "good", "good-dist")
    status = status_of(plugins, "good")
    assert status.hooks == ("vtensors_plugin", "vtensors_schemes")
    assert status.summary == "The fake plugin good."
    assert status.load_ms >= 0


@pytest.mark.fault("B99")
@pytest.mark.parametrize(
    "error", [ImportError("no module named torchx"), ValueError("boom"), SystemExit(3), SyntaxError("bad")]
)
def test_a_plugin_that_raises_at_import_is_named_and_harms_no_other(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plugins = discover(candidate("bad", error), GOOD)
    assert_contained(plugins, "bad", type(error).__name__, str(error))
    assert "Traceback" in status_of(plugins, "bad").traceback
    # B100: a failure is never swallowed without a word.
    assert "bad-dist 1.2" in caplog.text
    assert str(error) in caplog.text


@pytest.mark.fault("B99")
def test_nothing_half_done_stays_of_a_plugin_whose_registration_fails() -> None:
    def vtensors_progress(event: Progress, volume: int) -> None:
        raise AssertionError("must never be called")

    plugin = module("bad", {**schemes("half"), "vtensors_progress": vtensors_progress})
    plugins = discover(candidate("bad", plugin), GOOD)
    assert_contained(plugins, "bad", "volume")
    plugins.progress(Progress(task="load", done=1, total=2, unit="bytes"))
    assert not plugins._manager.is_registered(plugin)


def test_a_misspelled_hook_is_refused_with_the_nearest_one() -> None:
    plugins = discover(candidate("bad", module("bad", {"vtensors_conventon": lambda: [1]})), GOOD)
    assert_contained(plugins, "bad", "vtensors_conventon", "nearest hook is vtensors_conventions")


def test_a_hook_without_its_marker_is_refused() -> None:
    plugin = module("bad")

    def vtensors_schemes() -> list[Any]:
        return []

    plugin.vtensors_schemes = vtensors_schemes  # type: ignore[attr-defined]
    plugins = discover(candidate("bad", plugin), GOOD)
    assert_contained(plugins, "bad", "vtensors_schemes", "@vtensors.hookimpl")


def test_a_plugin_without_vtensors_plugin_is_refused() -> None:
    assert_contained(discover(candidate("bad", ModuleType("bad")), GOOD), "bad", "no vtensors_plugin()")


def test_another_api_version_is_refused_naming_both() -> None:
    info = PluginInfo(name="bad", summary="Old.", api_version=99)
    plugins = discover(candidate("bad", module("bad", info=info)), GOOD)
    assert_contained(plugins, "bad", "99", "this vtensors has 1")


def test_a_name_other_than_that_of_the_entry_point_is_refused() -> None:
    plugins = discover(candidate("bad", module("worse")), GOOD)
    assert_contained(plugins, "bad", "'bad'", "'worse'")


def test_a_hook_wrapper_is_refused() -> None:
    plugin = module("bad")

    @hookimpl(wrapper=True)
    def vtensors_schemes() -> Any:
        yield
        return []

    plugin.vtensors_schemes = vtensors_schemes  # type: ignore[attr-defined]
    assert_contained(discover(candidate("bad", plugin), GOOD), "bad", "is a wrapper")


def rubbish(value: object) -> Any:
    return value


def raises() -> list[Any]:
    raise RuntimeError("cannot say")


@pytest.mark.parametrize(
    ("hook", "function", "word"),
    [
        ("vtensors_schemes", raises, "cannot say"),
        ("vtensors_schemes", lambda: None, "None"),
        ("vtensors_schemes", lambda: "nvfp4", "not a list of vtensors.Scheme"),
        ("vtensors_schemes", lambda: [scheme("a"), 7], "int 7 at place 1"),
        ("vtensors_schemes", lambda: [scheme("a"), scheme("a")], "two records named 'a'"),
        ("vtensors_schemes", lambda: [scheme("")], "has no name"),
        ("vtensors_schemes", lambda: [attrs.evolve(scheme("a"), weight_class="nope")], "weight_class"),
        ("vtensors_conventions", lambda: [scheme("a")], "not a vtensors.Convention"),
        ("vtensors_conventions", lambda: [attrs.evolve(convention("a"), read=rubbish(3))], "int 3 as read"),
        (
            "vtensors_conventions",
            lambda: [attrs.evolve(convention("a"), forms=rubbish(("x",)))],
            "among its forms",
        ),
        ("vtensors_commands", lambda: [Command(name="a", summary="", load="a.b")], "'package.module:name'"),
        (
            "vtensors_switches",
            lambda: [Switch(name="VT_A", kind="bool", default="maybe", summary="")],
            "default that it does not accept",
        ),
        ("vtensors_switches", lambda: [Switch(name="A", kind="bool", default="1", summary="")], "VT_"),
        ("vtensors_plugin", raises, "cannot say"),
        ("vtensors_plugin", lambda: {"name": "bad"}, "not a vtensors.PluginInfo"),
    ],
)
def test_a_hook_that_raises_or_returns_rubbish_is_contained(hook: str, function: Any, word: str) -> None:
    assert_contained(discover(candidate("bad", module("bad", {hook: function})), GOOD), "bad", word)


def test_a_form_with_an_unreadable_shape_pattern_is_refused() -> None:
    record = convention("a")
    tensor = attrs.evolve(record.forms[0].tensors[0], shapes=("[n, k]",))
    record = attrs.evolve(record, forms=(attrs.evolve(record.forms[0], tensors=(tensor,)),))
    plugins = discover(candidate("bad", module("bad", conventions(record))), GOOD)
    assert_contained(plugins, "bad", "cannot be read: '[n, k]'")


def test_strict_plugins_makes_a_broken_one_fatal_and_names_it() -> None:
    with pytest.raises(PluginError, match=r"'bad' of bad-dist 1\.2 is refused\n  seen: ValueError: boom"):
        discover(candidate("bad", ValueError("boom")), GOOD, VT_STRICT="plugins")


# --- allow and deny -----------------------------------------------------------------------------------------


def loaded_under(words: str) -> dict[str, str]:
    plugins = Plugins.discover(
        builtins=[("switches", "vtensors_plugins.switches"), ("commands", "vtensors_plugins.commands")],
        third_parties=[candidate("acme"), candidate("other")],
        environ={"VT_PLUGINS": words},
    )
    return {status.name: status.state for status in plugins.statuses}


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        ("", set()),
        ("acme", {"other"}),
        ("acme,other", set()),
        ("-acme", {"acme"}),
        ("-Acme_Dist", {"acme"}),
        ("-commands", {"commands"}),
        ("acme,-acme", {"acme", "other"}),
        ("-commands,other", {"commands", "acme"}),
    ],
)
def test_vt_plugins_allows_and_denies_by_name(words: str, left_out: set[str]) -> None:
    states = loaded_under(words)
    assert {name for name, state in states.items() if state == "denied"} == left_out
    assert set(states) == {"switches", "commands", "acme", "other"}


def test_a_denied_plugin_is_never_imported() -> None:
    plugins = discover(candidate("bad", SystemExit("imported")), GOOD, VT_PLUGINS="-bad", VT_STRICT="plugins")
    assert status_of(plugins, "bad").state == "denied"
    assert "VT_PLUGINS=-bad" in status_of(plugins, "bad").error


def test_an_unknown_name_in_vt_plugins_or_vt_prefer_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        discover(GOOD, VT_PLUGINS="-godo", VT_PREFER="nobody")
    assert "'godo', which is not installed; plugins: good" in caplog.text
    assert "VT_PREFER names 'nobody'" in caplog.text


def test_a_bad_boot_switch_is_an_error() -> None:
    with pytest.raises(SwitchError, match="VT_STRICT"):
        discover(GOOD, VT_STRICT="everything")


# --- observers ----------------------------------------------------------------------------------------------


def test_observers_are_told_and_one_that_raises_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[object] = []

    def listens(record: Selected) -> None:
        heard.append(record)

    def breaks(record: Selected) -> None:
        raise RuntimeError("deaf")

    def needs_nothing() -> None:
        heard.append(None)

    plugins = discover(
        candidate("a", module("a", {"vtensors_selected": listens})),
        candidate("b", module("b", {"vtensors_selected": breaks})),
        candidate("c", module("c", {"vtensors_selected": needs_nothing})),
    )
    record = Selected(module="m", op="linear", scheme="bf16", declared="16bit", executed="16bit", kernel="k")
    with caplog.at_level(logging.WARNING):
        plugins.selected(record)
        plugins.selected(record)
    assert heard.count(record) == 2
    assert heard.count(None) == 2
    assert caplog.text.count("deaf") == 1
    assert "'b (b-dist)'" in caplog.text


def test_read_switches_knows_the_boot_switches_even_without_any_plugin() -> None:
    switches = discover().read_switches({"VT_STRICT": "files"})
    assert switches.names("VT_STRICT") == ("files",)


def test_a_marker_of_the_same_project_name_works_without_importing_vtensors() -> None:
    foreign = pluggy.HookimplMarker("vtensors")
    plugin = module("acme")
    plugin.vtensors_schemes = foreign(lambda: [scheme("x")])  # type: ignore[attr-defined]
    assert list(discover(candidate("acme", plugin)).registry.schemes) == ["x"]


def test_a_form_gives_a_required_role_once_and_an_optional_one_in_two_spellings() -> None:
    record = convention("a")
    weight = record.forms[0].tensors[0]
    twice = attrs.evolve(record.forms[0], tensors=(weight, attrs.evolve(weight, suffix="qweight")))
    plugin = module("bad", conventions(attrs.evolve(record, forms=(twice,))))
    assert_contained(discover(candidate("bad", plugin), GOOD), "bad", "role 'weight' twice")
    spellings = [
        attrs.evolve(weight, suffix=suffix, role="input_scale", required=False) for suffix in ("a", "b")
    ]
    either = attrs.evolve(record.forms[0], tensors=(weight, *spellings))
    plugin = module("fine", conventions(attrs.evolve(record, forms=(either,))))
    assert discover(candidate("fine", plugin)).quarantined == ()
