"""The jinja environment of chat templates: a sandbox. Nothing but the worker process renders in it."""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses to read names with an underscore in front, and to change what it is given, at once.

    jinja's own sandbox gives an undefined value for such a name, which prints as nothing.
    """

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Raises SecurityError."""
        raise jinja2.exceptions.SecurityError(
            f"access to attribute {attribute!r} of {type(obj).__name__!r} object"
        )


def new_environment() -> Sandbox:
    """The sandbox with what transformers gives to templates."""
    # As transformers renders templates (5.24, utils/chat_template_utils.py): the same flags, filters and
    # functions. The text is no HTML, so nothing is escaped.
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[jinja2.ext.loopcontrols, Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for training; here its body is simply text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
