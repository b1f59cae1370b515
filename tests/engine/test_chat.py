from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest

from fake_model import FakeFiles, fake_files
from vtensors.errors import DeclarationError, RequestError
from vtensors_engine.chat import ChatTemplate, open_chat_template

HELLO = [{"role": "user", "content": "Hello <b> & 'you'"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, file="chat_template.jinja", special_tokens={"bos_token": "<s>"})


def in_config(value: object) -> FakeFiles:
    config = json.dumps({"chat_template": value, "eos_token": "<|im_end|>"}).encode()
    return fake_files(chat_template__jinja=None, tokenizer_config__json=config)


def test_a_conversation_becomes_the_text_that_the_template_writes() -> None:
    found = open_chat_template(fake_files())
    assert found.file == "chat_template.jinja"
    text = found.render(HELLO)
    assert text == "<|im_start|>user\nHello <b> & 'you'<|im_end|><|im_start|>assistant"
    assert not found.render(HELLO, add_generation_prompt=False).endswith("assistant")


def test_the_template_file_goes_before_the_one_in_the_configuration() -> None:
    files = fake_files(tokenizer_config__json=b'{"chat_template": "from the configuration"}')
    assert open_chat_template(files).file == "chat_template.jinja"
    assert open_chat_template(in_config("from the configuration")).render(HELLO) == "from the configuration"


def test_named_templates_are_chosen_by_name() -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert open_chat_template(in_config(named)).render(HELLO) == "d"
    assert open_chat_template(in_config(named), "tool_use").render(HELLO) == "t"
    assert open_chat_template(in_config(named[1:])).render(HELLO) == "t"
    with pytest.raises(RequestError, match="default, tool_use"):
        open_chat_template(in_config(named), "rag")


@pytest.mark.parametrize("value", [7, [{"name": "default"}], ["x"], {"default": "x"}])
def test_a_template_of_another_form_is_refused_with_its_file(value: object) -> None:
    with pytest.raises(DeclarationError, match=r"tokenizer_config\.json"):
        open_chat_template(in_config(value))


def test_no_template_is_an_error_that_says_where_it_was_looked_for() -> None:
    with pytest.raises(RequestError) as caught:
        open_chat_template(fake_files(chat_template__jinja=None))
    assert "chat_template.jinja" in str(caught.value)
    assert "tokenizer_config.json" in str(caught.value)


def test_a_syntax_error_names_file_and_line() -> None:
    with pytest.raises(RequestError, match=r"chat_template\.jinja(.|\n)*line 2"):
        template("ok\n{% if %}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ missing.attribute }}", "missing"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_what_a_template_raises_is_a_request_error_with_file_and_message(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"(?i){message}") as caught:
        template(source).render(HELLO)
    assert caught.value.file == "chat_template.jinja"


def test_templates_have_what_transformers_gives_them() -> None:
    assert template("{{ bos_token }}").render(HELLO) == "<s>"
    assert template("{{ {'b': '<é>', 'a': 1} | tojson }}").render(HELLO) == '{"b": "<é>", "a": 1}'
    assert template("{{ [1] | tojson(indent=2) }}").render(HELLO) == "[\n  1\n]"
    assert template("{{ tools is none and documents is none }}").render(HELLO) == "True"
    assert template("{{ strftime_now('%Y') }}").render(HELLO).isdigit()
    loop = "{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert template(loop).render(HELLO) == "1"
    assert template("{% generation %}{{ messages[0].role }}{% endgeneration %}").render(HELLO) == "user"
    assert template("  {% if true %}\nx\n  {% endif %}\n").render(HELLO) == "x\n"


def test_further_variables_reach_the_template_and_cannot_replace_the_conversation() -> None:
    found = template("{{ enable_thinking }}{{ messages | length }}")
    assert found.render(HELLO, variables={"enable_thinking": False, "messages": []}) == "False1"


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, [{}], ["hello"], [{"role": 1}]])
def test_messages_that_are_no_conversation_are_refused(messages: object) -> None:
    with pytest.raises(RequestError, match="role"):
        template("x").render(messages)  # type: ignore[arg-type]


def test_the_template_of_the_bundled_model_is_read_from_either_file(shared: Path) -> None:
    folder = shared / "checkpoints" / "kjv-dense-modelopt-mixed-w4a16mlp-fp8attn"
    names = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json")
    files = {name: (folder / name).read_bytes() for name in names}
    rendered = "<|im_start|>user\nHi<|im_end|><|im_start|>assistant"
    messages = [{"role": "user", "content": "Hi"}]
    assert open_chat_template(FakeFiles(files=files)).render(messages) == rendered
    del files["chat_template.jinja"]
    assert open_chat_template(FakeFiles(files=files)).render(messages) == rendered


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CONCATENATES = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
STRINGS_ONLY = (
    "{% for m in messages %}{% if m.content is string %}{% set content = m.content %}{% else %}"
    "{% set content = '' %}{% endif %}{{ '<' + m.role + '>' + content }}{% endfor %}"
)
TYPED_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
READS_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}[{{ part.text }}]{% endfor %}{% endif %}{{ m.tool_calls }}{% endfor %}"
)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": []},
        {"role": "tool", "content": None, "tool_calls": [{"name": "f"}]},
        {"role": "user", "content": 7},
        {"role": "user", "content": {"type": "text", "text": "hi"}},
        {"role": "user", "content": []},
        {"role": "user", "content": ["hi"]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": [*parts("see"), {"type": "image", "image": "a.png"}]},
        {"role": "", "content": "hi"},
        {"role": "usr", "content": "hi"},
    ],
)
def test_a_message_that_says_nothing_usable_is_refused_in_full_sentences(message: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="message 1") as caught:
        template(READS_PARTS).render([*HELLO, message])
    assert caught.value.seen
    assert caught.value.accepted
    assert caught.value.fix


def test_a_role_of_its_own_is_a_role_where_the_template_names_it() -> None:
    narrator = [{"role": "narrator", "content": "Once"}]
    with pytest.raises(RequestError, match="narrator"):
        template(CHATML).render(narrator)
    assert template("{# 'narrator' #}" + CHATML).render(narrator) == "<narrator>Once"
    assert template(CHATML).render([{"role": "developer", "content": ""}]) == "<developer>"


@pytest.mark.parametrize("source", [CHATML, CONCATENATES])
def test_text_parts_are_joined_for_a_template_that_reads_strings_alone(source: str) -> None:
    assert template(source).render([{"role": "user", "content": parts("a", "b")}]) == "<user>ab"
    assert template(source).render([{"role": "user", "content": [{"text": "a"}]}]) == "<user>a"


@pytest.mark.parametrize("texts", [("Hello ", "you"), ("user", ""), ("<think>why</think>so", "a\n")])
def test_no_template_leaves_out_the_text_of_parts(texts: tuple[str, ...]) -> None:
    joined = "".join(texts)
    expected = f"<user>{joined}"
    # As Qwen3's, for which what is no string is nothing; as Llama 3.2's, for which a part without a type is none.
    for source in (STRINGS_ONLY, TYPED_PARTS):
        for content in (parts(*texts), [{"text": text} for text in texts]):
            assert template(source).render([{"role": "user", "content": content}]) == expected


def test_what_a_template_cuts_from_an_answer_does_not_cost_the_question_its_text() -> None:
    source = STRINGS_ONLY.replace("content }}", "content.split('</think>')[-1] }}")
    answer = {"role": "assistant", "content": parts("<think>why</think>so")}
    question = {"role": "user", "content": parts("Hello")}
    assert template(source).render([question, answer]) == "<user>Hello<assistant>so"


def test_parts_and_messages_may_be_any_mapping_and_stay_as_they_are() -> None:
    content = (MappingProxyType({"text": "a"}), MappingProxyType({"type": "text", "text": "b"}))
    message = MappingProxyType({"role": "user", "content": content})
    assert template(CONCATENATES).render([message]) == "<user>ab"
    assert message["content"] is content
    assert content[0] == {"text": "a"}


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
@pytest.mark.parametrize("none", [None, [], {}])
def test_calls_that_are_none_do_not_cost_a_message_its_content(key: str, none: object) -> None:
    # As Mistral's, which asks whether there is such a key; and what an OpenAI client dumps.
    source = "{% for m in messages %}{% if m.KEY is defined %}CALLS{% else %}{{ m.content }}{% endif %}{% endfor %}"
    answer = {"role": "assistant", "content": "so", key: none}
    source = source.replace("KEY", key)
    assert template(source).render([answer]) == "so"
    assert template(source).render([answer | {key: ["look"]}]) == "CALLS"


def test_text_parts_reach_a_template_that_reads_them() -> None:
    message = {"role": "user", "content": parts("a", "b")}
    assert template(READS_PARTS).render([message]).startswith("<user>[a][b]")


def test_an_assistant_that_calls_tools_needs_no_content() -> None:
    calls = {"role": "assistant", "tool_calls": ["look"]}
    assert template(READS_PARTS).render([*HELLO, calls]).endswith("<assistant>['look']")
    assert template(READS_PARTS).render([*HELLO, calls | {"content": None}]).endswith("['look']")


def test_tool_calls_that_a_template_would_drop_are_refused() -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": ["look"]}
    with pytest.raises(RequestError, match="tool_calls, which this chat template does not read"):
        template(CHATML).render([*HELLO, calls])


def test_variables_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(RequestError, match="variables of a chat template"):
        template("x").render(HELLO, variables=5)  # type: ignore[arg-type]
