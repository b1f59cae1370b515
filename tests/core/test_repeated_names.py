"""Two plugins that provide one name: no result depends on the order in which they are found (B101)."""

from __future__ import annotations

import itertools
from types import ModuleType

import attrs
import pytest

from fake_plugins import candidate, convention, conventions, discover, module, schemes, status_of
from vtensors.manager import Plugins
from vtensors.plugin_candidates import Candidate

GOOD = candidate("good", module("good", schemes("int8")))


def builtin(name: str, plugin: ModuleType) -> Candidate:
    return candidate(name, plugin, distribution="vtensors", builtin=True)


def in_every_order(*candidates: Candidate, **environ: str) -> list[Plugins]:
    return [discover(*order, **environ) for order in itertools.permutations(candidates)]


@pytest.mark.fault("B101")
def test_a_third_party_that_repeats_a_builtin_name_is_refused_naming_both() -> None:
    own = builtin("own", module("own", schemes("nvfp4")))
    theirs = candidate("acme", module("acme", schemes("nvfp4", "int4")))
    for plugins in in_every_order(own, theirs, GOOD):
        error = status_of(plugins, "acme").error
        assert "scheme 'nvfp4'" in error
        assert "acme-dist" in error
        assert "'own' of vtensors" in error
        assert plugins.registry.schemes["nvfp4"].plugin == "own"
        assert set(plugins.registry.schemes) == {"nvfp4", "int8"}
        assert status_of(plugins, "good").state == "active"


@pytest.mark.fault("B101")
def test_two_third_parties_of_one_name_are_both_refused_in_every_order() -> None:
    a = candidate("a", module("a", schemes("int4")))
    b = candidate("b", module("b", schemes("int4")))
    for plugins in in_every_order(a, b, GOOD):
        assert {status.name for status in plugins.quarantined} == {"a", "b"}
        assert "b-dist" in status_of(plugins, "a").error
        assert set(plugins.registry.schemes) == {"int8"}


@pytest.mark.fault("B101")
def test_the_preferred_plugin_wins_and_the_other_keeps_its_other_records() -> None:
    own = builtin("own", module("own", schemes("nvfp4", "bf16")))
    theirs = candidate("acme", module("acme", schemes("nvfp4")))
    cases = (("acme", "acme", "own"), ("acme-dist", "acme", "own"), ("own", "own", "acme"))
    for prefer, winner, loser in cases:
        for plugins in in_every_order(own, theirs, VT_PREFER=prefer):
            assert plugins.registry.schemes["nvfp4"].plugin == winner
            assert plugins.registry.schemes["bf16"].plugin == "own"
            assert plugins.quarantined == ()
            assert status_of(plugins, loser).shadowed == (f"scheme 'nvfp4' (replaced by '{winner}')",)


@pytest.mark.fault("B101")
def test_a_convention_that_declares_that_it_overrides_replaces_the_builtin() -> None:
    own = builtin("own", module("own", conventions(convention("modelopt"), convention("plain"))))
    theirs = candidate("acme", module("acme", conventions(convention("modelopt", overrides=("modelopt",)))))
    for plugins in in_every_order(own, theirs):
        assert plugins.registry.conventions["modelopt"].distribution == "acme-dist"
        assert plugins.registry.conventions["plain"].distribution == "vtensors"
        assert plugins.quarantined == ()


@pytest.mark.fault("B101")
def test_an_override_of_another_name_does_not_help() -> None:
    own = builtin("own", module("own", conventions(convention("modelopt"))))
    theirs = candidate("acme", module("acme", conventions(convention("modelopt", overrides=("plain",)))))
    assert [status.name for status in discover(own, theirs).quarantined] == ["acme"]


@pytest.mark.fault("B101")
def test_two_that_override_the_same_builtin_both_go_and_the_builtin_stays() -> None:
    own = builtin("own", module("own", conventions(convention("modelopt"))))
    record = convention("modelopt", overrides=("modelopt",))
    a, b = (candidate(name, module(name, conventions(record))) for name in "ab")
    for plugins in in_every_order(own, a, b):
        assert {status.name for status in plugins.quarantined} == {"a", "b"}
        assert plugins.registry.conventions["modelopt"].plugin == "own"


def test_one_name_of_two_kinds_is_no_repeat() -> None:
    both = {**schemes("plain"), **conventions(convention("plain"))}
    assert discover(candidate("acme", module("acme", both))).quarantined == ()


@pytest.mark.fault("B101")
def test_a_plugin_name_used_twice_is_refused_naming_both_distributions() -> None:
    first = candidate("twin", module("twin"), distribution="north")
    second = candidate("twin", module("twin"), distribution="south")
    plugins = discover(first, second, GOOD)
    assert [status.state for status in plugins.statuses] == ["active", "quarantined", "quarantined"]
    assert "south" in plugins.statuses[1].error
    own = attrs.evolve(first, builtin=True)
    plugins = discover(own, second)
    assert {status.distribution: status.state for status in plugins.statuses} == {
        "north": "active",
        "south": "quarantined",
    }
