"""Chat templates: a conversation becomes the text that the model was trained on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from vtensors.errors import DeclarationError, RequestError
from vtensors_engine.text import TOKENIZER_CONFIG_FILE, SideFiles, named_tokens

TEMPLATE_FILE = "chat_template.jinja"

Message = Mapping[str, object]


class ChatTemplate:
    """A checkpoint's chat template. file: where it was found; name: `default`, or as the checkpoint says."""

    def __init__(
        self,
        source: str,
        *,
        file: str,
        name: str = "default",
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.file = file
        self.name = name
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as cause:
            raise RequestError(
                f"the chat template cannot be read: {cause.message}", file=file, seen=f"line {cause.lineno}"
            ) from cause

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation; encode it without adding special tokens, it holds its own.

        messages: `role` and whatever else the template reads, usually `content`.
        add_generation_prompt: end with the opening of the assistant's answer.
        variables: what else the template knows, for example `tools` or `enable_thinking`.

        Raises RequestError for messages that are none, and with the template's file for what it raises.
        """
        _check_messages(messages)
        values: dict[str, object] = {
            # transformers defines these two always; templates compare them with none.
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except Exception as cause:  # a template can raise anything that an expression of Python can
            raise RequestError(
                f"the chat template does not accept the conversation: {cause or type(cause).__name__}",
                file=self.file,
                seen=f"roles {', '.join(str(message['role']) for message in messages)}",
                fix="see the template for the roles and contents it accepts",
            ) from cause


def open_chat_template(files: SideFiles, name: str | None = None) -> ChatTemplate:
    """The checkpoint's template: chat_template.jinja, else `chat_template` of tokenizer_config.json.

    name: one of several named templates; None is `default`, or the only one.
    Raises RequestError where there is none, or none of that name; DeclarationError for a bad value.
    """
    tokens = named_tokens(files)
    data = files.read_bytes(TEMPLATE_FILE)
    if data is not None and name in (None, "default"):
        try:
            source = data.decode("utf-8")
        except UnicodeDecodeError as cause:
            raise RequestError("the chat template is not valid UTF-8", file=TEMPLATE_FILE) from cause
        return ChatTemplate(source, file=TEMPLATE_FILE, special_tokens=tokens)
    sources = _named_sources((files.read_json(TOKENIZER_CONFIG_FILE) or {}).get("chat_template"))
    if not sources:
        raise RequestError(
            "the checkpoint has no chat template",
            file=TEMPLATE_FILE,
            seen=f"neither this file nor chat_template in {TOKENIZER_CONFIG_FILE}",
            fix="prompt it with plain text, or put the model's template beside its weights",
        )
    chosen = next(iter(sources)) if name is None and len(sources) == 1 else name or "default"
    if chosen not in sources:
        raise RequestError(
            f"there is no chat template '{chosen}'",
            file=TOKENIZER_CONFIG_FILE,
            accepted=", ".join(sorted(sources)),
        )
    return ChatTemplate(sources[chosen], file=TOKENIZER_CONFIG_FILE, name=chosen, special_tokens=tokens)


def _named_sources(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    found: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        name = entry.get("name") if isinstance(entry, dict) else None
        source = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(source, str):
            raise DeclarationError(
                "chat_template is not a template",
                file=TOKENIZER_CONFIG_FILE,
                seen=repr(entry)[:80],
                accepted="a string, or a list of objects with `name` and `template`",
            )
        found[name] = source
    return found


def _check_messages(messages: Sequence[Message]) -> None:
    accepted = "a list of at least one message such as {'role': 'user', 'content': '...'}"
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("there is no conversation", seen=repr(messages)[:80], accepted=accepted)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError("a message has no role", seen=repr(message)[:80], accepted=accepted)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for training; here its body is simply text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    # As transformers renders templates (5.24, utils/chat_template_utils.py): the same flags, filters and
    # functions. The text is no HTML, so nothing is escaped.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
