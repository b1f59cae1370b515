from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest

from vtensors.errors import RequestError
from vtensors_engine import chat_process
from vtensors_engine.chat import ChatTemplate, plain_text
from vtensors_engine.chat_environment import new_environment
from vtensors_engine.chat_process import MAX_SOURCE, ChatProcess, TemplateRefusedError
from vtensors_engine.chat_worker import CPU_SECONDS, MEMORY_BYTES, answer

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
PLAIN = "system: Be brief.\nuser: Hello\nassistant:"


def template(source: str) -> ChatTemplate:
    made = ChatTemplate(source, file="chat_template.jinja")
    made._process.render_seconds = 1.0
    return made


REFUSED = {
    "loop": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "memory": "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "constant": "{{ 'x' * 10000000000 }}",
    "formatted": "{{ '%9999999999d' % 1 }}",
    "output": "{{ messages[0].content * 1000000 }}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "attribute filter": "{{ (messages | attr('__class__')).__mro__ }}",
    "subscript": "{{ messages['__class__'].__mro__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "format_map": "{{ '{m.__class__.__mro__}'.format_map({'m': messages}) }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "self": "{{ self._TemplateReference__context.__init__ }}",
    "change": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_hostile_template_is_not_used_and_the_conversation_becomes_plain_text_with_one_warning(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        began = time.perf_counter()
        found = template(REFUSED[what])
        assert found.render(HELLO) == PLAIN
        assert found.render(HELLO) == PLAIN
        assert time.perf_counter() - began < 20
    assert len(caplog.records) == 1
    assert "chat_template.jinja: the chat template is not used" in caplog.records[0].getMessage()


def test_no_file_can_be_read_or_included_by_a_template() -> None:
    for source in ("{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}"):
        with pytest.raises(RequestError, match="loader"):
            template(source).render(HELLO)
    assert template("{{ open is defined or config is defined }}").render(HELLO) == "False"


def test_a_template_that_is_too_long_is_not_used() -> None:
    assert template("x" * (MAX_SOURCE + 1)).render(HELLO) == PLAIN


def test_a_process_that_is_killed_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    found = template("{{ messages[0].role }}")
    assert found.render(HELLO) == "system"
    process = found._process._process
    assert process is not None
    process.kill()
    process.wait()
    assert found.render(HELLO) == PLAIN
    assert "has ended" in caplog.text or "ended" in caplog.text


def test_the_process_has_nothing_of_the_environment_and_ends_with_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    owner = ChatProcess()
    assert owner.render("{{ a }}", {"a": 1}, file="x") == "1"
    process = owner._process
    assert process is not None
    if Path("/proc").is_dir():
        assert b"secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    del owner
    assert process.poll() is not None


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_the_process_is_bounded_in_memory_computing_time_and_files() -> None:
    owner = ChatProcess()
    owner.check("x", file="x")
    process = owner._process
    assert process is not None
    lines = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    soft = {line[:26].strip(): line[26:].split()[0] for line in lines}
    assert soft["Max address space"] == str(MEMORY_BYTES)
    assert int(soft["Max cpu time"]) <= CPU_SECONDS + 2
    assert soft["Max file size"] == "0"


def test_a_process_answers_many_conversations() -> None:
    owner = ChatProcess()
    owner.check("{{ a }}", file="x")
    began = time.perf_counter()
    assert [owner.render("{{ a }}", {"a": n}, file="x") for n in range(50)] == [str(n) for n in range(50)]
    assert time.perf_counter() - began < 5
    owner.stop()
    assert owner.render("{{ a }}", {"a": 2}, file="x") == "2"


def test_an_interrupted_conversation_is_not_the_answer_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = ChatProcess()
    owner.check("{{ a }}", file="x")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat_process, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            owner.render("{{ a }}", {"a": 1}, file="x")
    assert owner.render("{{ a }}", {"a": 2}, file="x") == "2"


def test_variables_that_are_no_json_are_refused() -> None:
    with pytest.raises(RequestError, match="JSON"):
        template("x").render(HELLO, variables={"tools": [object()]})


def test_plain_text_joins_the_text_parts_of_a_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "tool"}]
    assert plain_text(messages, add_generation_prompt=False) == "user: ab\ntool: "


def test_the_worker_says_which_kind_of_fault_it_was() -> None:
    environment = new_environment()
    assert answer(environment, "{{ a }}", {"a": 1}) == {"text": "1"}
    assert answer(environment, "{% if %}", None)["line"] == 1
    assert answer(environment, "{{ raise_exception('no') }}", {}) == {"error": "no", "line": None}
    assert "unsafe" in answer(environment, "{{ ''.__class__.x }}", {})["refused"]


def test_an_answer_that_claims_to_be_endless_is_refused() -> None:
    owner = ChatProcess(render_seconds=1.0)
    read, write = os.pipe()
    os.write(write, (1 << 60).to_bytes(8, "little"))
    owner.check("x", file="x")
    process = owner._process
    assert process is not None
    assert process.stdout is not None
    os.dup2(read, process.stdout.fileno())
    with pytest.raises(TemplateRefusedError, match="bytes"):
        owner.render("x", json.loads("{}"), file="x")
    os.close(read)
    os.close(write)


def test_plain_text_keeps_the_calls_of_tools() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    text = plain_text(
        [{"role": "assistant", "content": None, "tool_calls": [call]}], add_generation_prompt=False
    )
    assert text.startswith('assistant: {"tool_calls": [{"type": "function"')
    assert '"Zürich"' in text


def test_calls_of_tools_that_are_no_json_are_refused_whether_or_not_the_template_is_used() -> None:
    endless: list[object] = []
    endless.append(endless)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for source in ("{{ messages[0].tool_calls }}", "{{ tool_calls.__class__ }}"):
        found = template(source)
        for calls in ([{("city", 1): "Zürich"}], endless, deep):
            with pytest.raises(RequestError, match="JSON"):
                found.render([{"role": "assistant", "content": None, "tool_calls": calls}])
