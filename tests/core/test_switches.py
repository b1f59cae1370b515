from __future__ import annotations

import logging
from pathlib import Path

import pytest

from vtensors.errors import SwitchError
from vtensors.records import Switch
from vtensors.switches import BOOT_SWITCHES, Switches, accepted_words, warn_of_unknown

FLAG = Switch(name="VT_FLAG", kind="bool", default="1", summary="A flag.")
PLACE = Switch(name="VT_PLACE", kind="path", default="", summary="A path.")
WORD = Switch(name="VT_WORD", kind="str", default="fast", summary="A word.", accepted=("fast", "exact"))
TIME = Switch(name="VT_TIME", kind="seconds", default="60", summary="A time.")
DECLARED = (*BOOT_SWITCHES, FLAG, PLACE, WORD, TIME)


def read(**environ: str) -> Switches:
    return Switches.read(DECLARED, environ)


def test_an_unset_flag_has_its_default_and_is_known_to_be_unset() -> None:
    switches = read()
    assert switches.flag("VT_FLAG") is True
    assert switches.get("VT_FLAG") is None
    assert switches.values["VT_FLAG"].source == "default"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("0", False), ("true", True), ("OFF", False), ("yes", True), (" no ", False)],
)
def test_a_set_flag_is_read_and_is_known_to_be_set(text: str, value: bool) -> None:
    switches = read(VT_FLAG=text)
    assert switches.flag("VT_FLAG") is value
    assert switches.get("VT_FLAG") is value
    assert switches.values["VT_FLAG"].source == "environment"


def test_an_empty_variable_counts_as_unset() -> None:
    assert read(VT_FLAG="").get("VT_FLAG") is None
    assert read(VT_STRICT=" ").names("VT_STRICT") == ()


@pytest.mark.parametrize("text", ["2", "ja", "True!", "-1"])
def test_a_bad_flag_is_refused_naming_variable_value_and_accepted_ones(text: str) -> None:
    with pytest.raises(SwitchError) as caught:
        read(VT_FLAG=text)
    message = str(caught.value)
    assert "VT_FLAG" in message
    assert repr(text) in message
    assert "1, true, yes, on or 0, false, no, off" in message


def test_every_word_that_the_documentation_gives_for_a_flag_is_accepted_and_no_other_is_told() -> None:
    on, off = (words.split(", ") for words in accepted_words(FLAG).split(" or "))
    assert [read(VT_FLAG=word).flag("VT_FLAG") for word in on] == [True] * 4
    assert [read(VT_FLAG=word).flag("VT_FLAG") for word in off] == [False] * 4


def test_strict_one_means_all_and_zero_means_none() -> None:
    every = ("conflicts", "fallbacks", "plugins", "files", "untested")
    assert read(VT_STRICT="1").names("VT_STRICT") == every
    assert read(VT_STRICT="0").names("VT_STRICT") == ()


def test_strict_words_are_split_and_a_misspelled_one_is_refused_with_the_nearest() -> None:
    assert read(VT_STRICT="plugins, files,plugins").names("VT_STRICT") == ("plugins", "files")
    with pytest.raises(SwitchError, match="did you mean conflicts"):
        read(VT_STRICT="conflict")


def test_open_names_take_a_leading_minus_and_refuse_other_signs() -> None:
    assert read(VT_PLUGINS="acme,-modelopt").names("VT_PLUGINS") == ("acme", "-modelopt")
    with pytest.raises(SwitchError, match="VT_PLUGINS"):
        read(VT_PLUGINS="acme;other")


def test_a_closed_str_switch_refuses_other_words() -> None:
    assert read(VT_WORD="exact").text("VT_WORD") == "exact"
    assert read().text("VT_WORD") == "fast"
    with pytest.raises(SwitchError, match="fast or exact"):
        read(VT_WORD="slow")


def test_a_path_is_expanded_and_absent_when_empty() -> None:
    assert read().path("VT_PLACE") is None
    assert read(VT_PLACE="~/x").path("VT_PLACE") == Path.home() / "x"


@pytest.mark.parametrize(("text", "value"), [("", 60.0), ("0", 0.0), ("7.5", 7.5), (" 1e3 ", 1000.0)])
def test_seconds_are_numbers_from_zero_on(text: str, value: float) -> None:
    assert read(VT_TIME=text).seconds("VT_TIME") == value


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "1m", "sixty"])
def test_seconds_that_are_no_such_number_are_refused(text: str) -> None:
    with pytest.raises(SwitchError, match="VT_TIME") as caught:
        read(VT_TIME=text)
    assert "a number of seconds, 0 or more" in str(caught.value)


def test_an_unknown_variable_is_warned_of_once_with_the_nearest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        read(VT_STRIKT="1", OTHER="2")
    assert len(caplog.records) == 1
    assert "VT_STRIKT is set, but no enabled plugin reads it; did you mean VT_STRICT?" in caplog.text


def test_an_unknown_variable_that_is_near_to_none_lists_the_switches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        read(VT_NONSENSE_OF_MINE="1")
    assert "did you mean" not in caplog.text
    assert "(switches: " in caplog.text
    assert "VT_STRICT" in caplog.text


def test_what_was_warned_of_is_not_told_again(caplog: pytest.LogCaptureFixture) -> None:
    told: set[str] = set()
    with caplog.at_level(logging.WARNING):
        warn_of_unknown(["VT_A"], {"VT_B": "1"}, told=told)
        warn_of_unknown(["VT_A"], {"VT_B": "1", "VT_C": "1"}, told=told)
    assert [record.args[0] for record in caplog.records if record.args] == ["VT_B", "VT_C"]


def test_an_undeclared_or_wrongly_typed_access_is_an_error() -> None:
    with pytest.raises(SwitchError, match="VT_NOWHERE"):
        read().flag("VT_NOWHERE")
    with pytest.raises(TypeError, match="VT_FLAG is a switch of kind bool"):
        read().names("VT_FLAG")


def test_values_do_not_change_after_they_were_read() -> None:
    environ = {"VT_FLAG": "0"}
    switches = Switches.read(DECLARED, environ)
    environ["VT_FLAG"] = "1"
    assert switches.flag("VT_FLAG") is False


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_FLAG", "0")
    assert Switches.read(DECLARED).flag("VT_FLAG") is False
