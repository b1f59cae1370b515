"""Text to token ids and back: the checkpoint's tokenizer, and a detokenizer for text that grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import tokenizers

from vtensors.errors import DeclarationError, RequestError

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"

# What a decoder writes for bytes that are not a whole character yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class SideFiles(Protocol):
    """The small files of a checkpoint, by name; None for one that is not there. A `Snapshot` is one."""

    def read_json(self, name: str) -> dict[str, object] | None:
        """The JSON object in the file."""

    def read_bytes(self, name: str) -> bytes | None:
        """The file's content."""


class Decoder(Protocol):
    """What a `Detokenizer` needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids."""

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves the id out, whatever its neighbours are."""


class Tokenizer:
    """The tokenizer of a checkpoint, as its tokenizer.json defines it.

    special_tokens: `bos_token`, `eos_token`, `pad_token`, `unk_token` -> text, where named.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        add_bos_token: bool | None = None,
    ) -> None:
        # A truncation or padding left in the file by training would change prompts silently.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.special_tokens = dict(special_tokens or {})
        self._add_bos_token = add_bos_token
        self._bos_id = self.token_id(self.special_tokens.get("bos_token"))
        added = inner.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of the text.

        add_special_tokens: let tokenizer.json's post-processor add what it adds, and follow `add_bos_token`
        of tokenizer_config.json where it is written: true puts a bos in front unless one is there already,
        false leaves out the one that the post-processor would add. False for text that a chat template made.

        Raises RequestError for text that is not valid Unicode, or that this tokenizer.json cannot encode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as cause:
            raise RequestError(
                "the text holds half a surrogate pair, which no tokenizer can read",
                seen=f"U+{ord(text[cause.start]):04X} at {cause.start}",
                accepted="valid Unicode",
                fix="correct the text, or encode it with errors='replace' before",
            ) from cause
        ids = self._ids(text, add_special_tokens=add_special_tokens)
        if not add_special_tokens or self._bos_id is None or self._add_bos_token is None:
            return ids
        has_bos = ids[:1] == [self._bos_id]
        if self._add_bos_token:
            return ids if has_bos else [self._bos_id, *ids]
        plain = self._ids(text, add_special_tokens=False)
        return ids[1:] if has_bos and plain[:1] != [self._bos_id] else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids; ids that the tokenizer does not know have none."""
        try:
            return str(self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        except BaseException as cause:
            raise _unreadable(cause) from cause

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves the id out: a special token, or one that the tokenizer does not know."""
        return token_id in self._special_ids or self._inner.id_to_token(token_id) is None

    def token_id(self, token: str | None) -> int | None:
        """The id of one whole token, None where there is no such token."""
        found = None if token is None else self._inner.token_to_id(token)
        return None if found is None else int(found)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)
        except BaseException as cause:
            raise _unreadable(cause) from cause


def open_tokenizer(files: SideFiles) -> Tokenizer | None:
    """The checkpoint's tokenizer, None where it has no tokenizer.json (`missing_tokenizer` is the error).

    Raises RequestError for a tokenizer.json that cannot be read, DeclarationError for a bad configuration.
    """
    data = files.read_bytes(TOKENIZER_FILE)
    if data is None:
        return None
    try:
        inner = tokenizers.Tokenizer.from_buffer(data)
    except BaseException as cause:
        raise _unreadable(cause) from cause
    config = files.read_json(TOKENIZER_CONFIG_FILE) or {}
    add_bos_token = config.get("add_bos_token")
    if add_bos_token is not None and not isinstance(add_bos_token, bool):
        raise DeclarationError(
            "add_bos_token is not a truth value",
            file=TOKENIZER_CONFIG_FILE,
            seen=repr(add_bos_token),
            accepted="true, false or null",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    return Tokenizer(inner, special_tokens=named_tokens(files), add_bos_token=add_bos_token)


def _unreadable(cause: BaseException) -> BaseException:
    """The error for a fault of tokenizer.json; an interrupt stays what it is.

    The library raises plain Exception, and where its Rust code panics a BaseException that cannot be imported.
    """
    if not isinstance(cause, Exception) and type(cause).__name__ != "PanicException":
        return cause
    return RequestError(
        "the tokenizer cannot be read",
        file=TOKENIZER_FILE,
        seen=str(cause)[:200],
        accepted="a file that this version of the `tokenizers` library reads",
        fix="upgrade `tokenizers`, or fetch the file again",
    )


def missing_tokenizer(what: str) -> RequestError:
    """The error for a request that needs the tokenizer of a checkpoint without one. what: such as `text`."""
    return RequestError(
        f"{what} cannot be used: the checkpoint has no tokenizer",
        file=TOKENIZER_FILE,
        seen="no such file",
        accepted="prompts as lists of token ids; their completions carry token ids and no text",
        fix=f"put the model's {TOKENIZER_FILE} beside its weights",
    )


def named_tokens(files: SideFiles) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... -> text: tokenizer_config.json first, then special_tokens_map.json."""
    found: dict[str, str] = {}
    for file in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE):
        values = files.read_json(file) or {}
        for name in _NAMED_TOKENS:
            value = values.get(name)
            if isinstance(value, dict):
                # The older form: an AddedToken written out as an object.
                value = value.get("content")
            if isinstance(value, str) and name not in found:
                found[name] = value
    return found


def end_token_ids(files: SideFiles, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a text, sorted.

    Those of generation_config.json, or where it names none of config.json (its `text_config` after its top
    level); with them the tokenizer's own eos token. Raises DeclarationError for anything but ids.
    """
    config = files.read_json(CONFIG_FILE) or {}
    text_config = config.get("text_config")
    places: list[tuple[str, object]] = [
        (GENERATION_FILE, (files.read_json(GENERATION_FILE) or {}).get("eos_token_id")),
        (CONFIG_FILE, config.get("eos_token_id")),
        (CONFIG_FILE, text_config.get("eos_token_id") if isinstance(text_config, dict) else None),
    ]
    file, value = next(((file, value) for file, value in places if value is not None), (CONFIG_FILE, []))
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise DeclarationError(
            "eos_token_id is not a token id",
            file=file,
            seen=repr(value),
            accepted="an integer >= 0 or a list of them",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    own = None if tokenizer is None else tokenizer.token_id(tokenizer.special_tokens.get("eos_token"))
    return tuple(sorted({*ids, *(() if own is None else (own,))}))


@attrs.define
class Detokenizer:
    """Text of token ids that come one after the other; a piece is never half a character.

    The pieces, with that of `flush`, joined are `decode` of all ids. Two windows are decoded per token: the
    tokens from `prefix` to `read`, whose text is out, and those with what has come since; their difference
    is new text, kept back while it ends in U+FFFD, that is inside of a character. (A byte-fallback decoder
    turns a whole run of bytes into U+FFFD when a later byte breaks it; there a character that was already
    out stays.)
    """

    decoder: Decoder
    _heard: list[int] = attrs.field(factory=list, init=False)
    _prefix: int = attrs.field(default=0, init=False)
    _read: int = attrs.field(default=0, init=False)

    def push(self, token_id: int) -> str:
        """The text that the token completes, often empty."""
        # A run of tokens without text would make the window, and the time of every token, longer and longer.
        if self.decoder.is_silent(token_id):
            return ""
        self._heard.append(token_id)
        piece = self._new_text()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._heard)
        return piece

    def flush(self) -> str:
        """What is still kept back; a character that never became whole is U+FFFD."""
        piece = self._new_text()
        self._prefix = self._read = len(self._heard)
        return piece

    def _new_text(self) -> str:
        known = self.decoder.decode(self._heard[self._prefix : self._read])
        return self.decoder.decode(self._heard[self._prefix :])[len(known) :]
