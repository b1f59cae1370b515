"""Chat templates: a conversation becomes the text that the model was trained on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from vtensors.errors import DeclarationError, RequestError
from vtensors_engine.chat_messages import (
    Message,
    as_templates_read,
    calls_text,
    check_messages,
    content_text,
    has_parts,
    texts_shown,
    with_joined_parts,
)
from vtensors_engine.chat_process import ChatProcess, TemplateRefusedError
from vtensors_engine.text import TOKENIZER_CONFIG_FILE, SideFiles, named_tokens

TEMPLATE_FILE = "chat_template.jinja"

_log = logging.getLogger("vtensors")


class ChatTemplate:
    """A checkpoint's chat template. file: where it was found; name: `default`, or as the checkpoint says.

    It is code of the publisher's, so another process runs it, bounded in time, memory and output. One that
    breaks a bound or reaches for Python's insides is not run again: conversations become plain text, with one
    warning. Raises RequestError for a template with a syntax error.
    """

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
        self._source = source
        self._refused = False
        self._process = ChatProcess()
        try:
            self._process.check(source, file=file)
        except TemplateRefusedError as cause:
            self._refuse(cause)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation; encode it without adding special tokens, it holds its own.

        messages: `role`, `content` and whatever else the template reads. The content is a string or a list of
        `{"type": "text", "text": ...}`, which are joined for a template that reads strings alone; an assistant's
        message with `tool_calls` may have none.
        add_generation_prompt: end with the opening of the assistant's answer.
        variables: what else the template knows, for example `tools` or `enable_thinking`.

        Messages and variables are JSON values. Raises RequestError for anything else, for messages that are
        none, and with the template's file for what it raises.
        """
        check_messages(messages, template=self._source, file=self.file)
        if variables is not None and not isinstance(variables, Mapping):
            raise RequestError(
                "the variables of a chat template cannot be used",
                seen=repr(variables)[:80],
                accepted="a dictionary such as {'enable_thinking': False}, or None",
                fix="pass them by name",
            )
        values: dict[str, object] = {
            # transformers defines these two always; templates compare them with none.
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        if not self._refused:
            try:
                return self._rendered(values, as_templates_read(messages))
            except TemplateRefusedError as cause:
                self._refuse(cause)
        return plain_text(messages, add_generation_prompt=add_generation_prompt)

    def _rendered(self, values: dict[str, object], messages: Sequence[Message]) -> str:
        """The template's text. One that reads strings alone fails on a list of parts, leaves it out, or prints it as
        Python does. So it gets the list and the joined text: that of which it shows more counts, else the list.
        """
        found: list[str] = []
        ways = [messages, with_joined_parts(messages)] if has_parts(messages) else [messages]
        for way in ways:
            try:
                found.append(self._process.render(self._source, {**values, "messages": way}, file=self.file))
            except RequestError:
                if way is ways[-1] and not found:
                    raise
        return max(found, key=lambda text: texts_shown(text, messages))

    def _refuse(self, cause: TemplateRefusedError) -> None:
        self._refused = True
        self._process.stop()
        _log.warning(
            "%s: the chat template is not used: %s; conversations become plain lines of role and content, "
            "which the model was not trained on",
            self.file,
            cause,
        )


def plain_text(messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """A conversation as lines `role: content`, for a template that must not run; calls of tools follow as JSON."""
    lines = [
        f"{message['role']}: {content_text(message.get('content'))}{calls_text(message)}"
        for message in messages
    ]
    return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)


def open_chat_template(files: SideFiles, name: str | None = None) -> ChatTemplate:
    """The checkpoint's template: chat_template.jinja, else `chat_template` of tokenizer_config.json.

    name: one of several named templates; None is `default`, or the only one.
    Raises RequestError where there is none, or none of that name; DeclarationError for a bad value.
    """
    source, file, chosen = open_chat_template_source(files, name)
    return ChatTemplate(source, file=file, name=chosen, special_tokens=named_tokens(files))


def open_chat_template_source(files: SideFiles, name: str | None = None) -> tuple[str, str, str]:
    """The text of the template, its file and its name; nothing of it is run. As `open_chat_template`."""
    data = files.read_bytes(TEMPLATE_FILE)
    if data is not None and name in (None, "default"):
        try:
            return data.decode("utf-8"), TEMPLATE_FILE, "default"
        except UnicodeDecodeError as cause:
            raise RequestError(
                "the chat template is not valid UTF-8",
                file=TEMPLATE_FILE,
                seen="bytes that are none",
                accepted="text in UTF-8",
                fix="download the file again",
            ) from cause
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
            seen=repr(name),
            accepted=", ".join(sorted(sources)),
            fix="name one of these",
        )
    return sources[chosen], TOKENIZER_CONFIG_FILE, chosen


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
                fix="put the model's own chat template beside its weights",
            )
        found[name] = source
    return found
