"""What a conversation is: messages with a role and content, checked before a template sees them.

A template prints what it is given: without a check, a message without content becomes an empty turn or the word
`None`, and a mistyped role one that the model has never met.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from vtensors.errors import RequestError

Message = Mapping[str, object]

# Roles that chat templates share; what else a template names in quotes is a role of its own.
ROLES = ("system", "developer", "user", "assistant", "tool")
# An assistant's message that calls tools says nothing besides: the OpenAI API's form, which templates follow.
_CALLS = ("tool_calls", "function_call")

_MESSAGES = "a list of at least one message such as {'role': 'user', 'content': '...'}"
_CONTENT = (
    "a string, or a list of parts {'type': 'text', 'text': '...'}; only an assistant's message with tool_calls "
    "may have none"
)


def check_messages(messages: Sequence[Message], *, template: str, file: str) -> None:
    """Raises RequestError naming the first message that is none, with what was seen and what is accepted.

    template: the source of the chat template, which may name roles of its own. file: where it is, for messages.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "there is no conversation: messages have a role and content",
            seen=repr(messages)[:80],
            accepted=_MESSAGES,
            fix="pass [{'role': 'user', 'content': text}]",
        )
    for index, message in enumerate(messages):
        _check_role(message, index, template, file)
        _check_calls(message, index, template, file)
        _check_content(message, index)


def has_parts(messages: Sequence[Message]) -> bool:
    """Whether the content of a message is a list of parts."""
    return any(isinstance(message.get("content"), list | tuple) for message in messages)


def as_templates_read(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages with a type in each part, and without calls that are none.

    Templates leave out a part without a type, and the content of a message that has `tool_calls`, even an empty list.
    """
    return [_as_templates_read(message) for message in messages]


def texts_shown(text: str, messages: Sequence[Message]) -> int:
    """How often a template wrote the texts of parts; -1 where it wrote a list as Python does.

    A template that takes content for a string does that, or writes nothing in its place.
    """
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    if any(str(content) in text for content in contents):
        return -1
    texts = {str(part["text"]).strip() for content in contents for part in content}
    return sum(text.count(one) for one in texts if one)


def with_joined_parts(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages with the texts of their parts joined to a string, for a template that reads strings alone."""
    return [
        {**message, "content": content_text(message["content"])}
        if isinstance(message.get("content"), list | tuple)
        else dict(message)
        for message in messages
    ]


def content_text(content: object) -> str:
    """The text of a message's content; empty where it has none."""
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def calls_text(message: Message) -> str:
    """The tools that a message calls, as JSON; empty where it calls none. Raises RequestError for what is no JSON."""
    calls = {key: message[key] for key in _CALLS if message.get(key)}
    try:
        return json.dumps(calls, ensure_ascii=False, default=str) if calls else ""
    except (TypeError, ValueError, RecursionError) as cause:
        raise RequestError(
            "the tools that a message calls cannot be written as JSON",
            seen=str(cause),
            accepted="JSON values: strings, numbers, booleans, None, lists and dictionaries of them",
            fix="convert them, as json.dumps must take them",
        ) from cause


def _as_templates_read(message: Message) -> dict[str, object]:
    found = {key: value for key, value in message.items() if value or key not in _CALLS}
    content = found.get("content")
    if isinstance(content, list | tuple):
        found["content"] = [{"type": "text", **part} for part in content if isinstance(part, Mapping)]
    return found


def _check_role(message: object, index: int, template: str, file: str) -> None:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"message {index} has no role",
            seen=repr(message)[:80],
            accepted=_MESSAGES,
            fix=f"give it a role: {', '.join(ROLES)}",
        )
    if role not in ROLES and not re.search(f"(['\"]){re.escape(role)}\\1", template):
        raise RequestError(
            f"message {index} has a role that neither conversations nor this chat template know",
            file=file,
            seen=f"role {role!r}",
            accepted=f"{', '.join(ROLES)}, or one that the template names",
            fix="correct the role",
        )


def _check_calls(message: Message, index: int, template: str, file: str) -> None:
    lost = next((key for key in _CALLS if message.get(key) and key not in template), None)
    if lost is not None:
        raise RequestError(
            f"message {index} has {lost}, which this chat template does not read",
            file=file,
            seen=repr(message[lost])[:80],
            accepted="messages of role and content",
            fix=f"leave {lost} out, or use a model whose template reads it",
        )


def _check_content(message: Message, index: int) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if message["role"] == "assistant" and any(message.get(key) for key in _CALLS):
            return
        seen = f"content None, role {message['role']!r}" if "content" in message else repr(dict(message))[:80]
        raise RequestError(
            f"message {index} has no content",
            seen=seen,
            accepted=_CONTENT,
            fix="give it content, or leave the message out",
        )
    if not isinstance(content, list | tuple) or not content:
        raise RequestError(
            f"the content of message {index} cannot be used",
            seen=repr(content)[:80],
            accepted=_CONTENT,
            fix="pass text",
        )
    for part in content:
        if not _is_text(part):
            raise RequestError(
                f"the content of message {index} holds a part that is not text",
                seen=repr(part)[:80],
                accepted="{'type': 'text', 'text': '...'}",
                fix="leave it out: models read text alone here, images and the like are not seen",
            )


def _is_text(part: object) -> bool:
    return (
        isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
    )
