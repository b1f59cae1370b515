"""What a convention answered, held against the records it must consist of, before anything is done with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import attrs

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import DeclarationError
from vtensors.forms import Form
from vtensors.matching import Matcher
from vtensors.records import (
    Claim,
    Conflict,
    Declaration,
    DeclaredScheme,
    KvCacheDeclared,
    Refusal,
    StackedPart,
)

_log = logging.getLogger("vtensors")


def check_declaration(declaration: object) -> Declaration:
    """The declaration itself. Raises TypeError naming the first field that is not what its record says."""
    if not isinstance(declaration, Declaration):
        raise TypeError(f"declare() returned {type(declaration).__name__}")
    if not callable(declaration.scheme_of) or not isinstance(declaration.summary, str):
        raise TypeError("declare() returned a Declaration whose scheme_of or summary is something else")
    for field, record in (("conflicts", Conflict), ("matchers", Matcher), ("warnings", str)):
        items = getattr(declaration, field)
        if not isinstance(items, tuple | list) or not all(isinstance(item, record) for item in items):
            raise TypeError(f"declare() returned {field} that are not a tuple of {record.__name__}")
    if declaration.kv_cache is not None and not isinstance(declaration.kv_cache, KvCacheDeclared):
        raise TypeError("declare() returned a kv_cache that is not a KvCacheDeclared")
    return declaration


@attrs.define
class CheckedSchemeOf:
    """A declaration's `scheme_of`; silent, after one warning naming its owner, from its first failure on."""

    scheme_of: Callable[[str], DeclaredScheme | None]
    owner: str
    _failed: bool = attrs.field(init=False, default=False)

    def __call__(self, module: str) -> DeclaredScheme | None:
        """What is declared of the module. Raises the convention's own DeclarationError."""
        if self._failed:
            return None
        try:
            found: object = self.scheme_of(module)
            if found is None or isinstance(found, DeclaredScheme):
                return found
            raise TypeError(f"scheme_of() returned {type(found).__name__}")
        except DeclarationError:
            raise
        except PLUGIN_FAILURES as problem:  # a broken plugin must not stop the others
            self._failed = True
            _log.warning(
                "%s failed at '%s' and its declaration is left out: %s: %s",
                self.owner,
                module,
                type(problem).__name__,
                problem,
            )
            return None


def check_answers(answers: Sequence[object], convention: str, known: set[int]) -> None:
    """Raises TypeError for what is neither a Refusal nor a Claim of the convention on tensors that are known.

    known: `id` of every TensorInfo that was given.
    """
    forms: set[int] = set()  # ids of those that are forms: tens of thousands of claims share a few
    for answer in answers:
        if isinstance(answer, Claim):
            if id(answer.form) not in forms or answer.convention != convention:
                _check_form(answer, convention)
                forms.add(id(answer.form))
            _check_claim(answer, known)
        elif not isinstance(answer, Refusal):
            raise TypeError(f"claim() returned {type(answer).__name__}, expected Claim or Refusal")
        elif not isinstance(answer.module, str) or not isinstance(answer.reason, str):
            raise TypeError("claim() returned a Refusal whose module or reason is not a string")


def _check_form(claim: Claim, convention: str) -> None:
    if not isinstance(claim.form, Form):
        raise _wrong(claim, "form")
    if claim.convention != convention:
        raise _wrong(claim, "convention")


def _check_claim(claim: Claim, known: set[int]) -> None:
    if not isinstance(claim.module, str):
        raise _wrong(claim, "module")
    if not isinstance(claim.scheme, str):
        raise _wrong(claim, "scheme")
    if not isinstance(claim.shape, tuple):
        raise _wrong(claim, "shape")
    if claim.declared is not None and not isinstance(claim.declared, DeclaredScheme):
        raise _wrong(claim, "declared")
    if claim.part is not None and not isinstance(claim.part, StackedPart):
        raise _wrong(claim, "part")
    if not claim.roles:
        raise _wrong(claim, "roles")
    for info in claim.roles.values():
        if id(info) not in known:
            raise TypeError(f"claim on '{claim.module}' names a tensor that the checkpoint does not hold")


def _wrong(claim: Claim, field: str) -> TypeError:
    return TypeError(f"claim on '{claim.module}' has {getattr(claim, field)!r:.60} as its {field}")
