"""`VT_KERNELS`: which kernels the user wants or forbids, per scheme.

`nvfp4:linear_nvfp4_*,fp8-*:!linear_fp8_widening` is a list of `scheme glob:kernel glob`; `!` forbids. Where a scheme
has rules without `!`, only the kernels they name compute its ops, for the rows M that these kernels serve. Ops that
no named kernel computes, neither whole nor in parts, are left alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

import attrs

from vtensors.errors import SwitchError
from vtensors.records import KernelSpec
from vtensors.registry import Registry

SWITCH = "VT_KERNELS"
_GLOB = frozenset("*?[")
# So many accepted names are shown at most, the nearest ones first.
_MOST_NAMES = 8
_FEW_NAMES = 5


@attrs.frozen(kw_only=True)
class KernelRule:
    """One entry. scheme, kernel: globs. forbids: whether it had a `!`. text: as the user wrote it."""

    scheme: str
    kernel: str
    forbids: bool
    text: str

    def speaks_of(self, scheme: str) -> bool:
        """Whether the rule is about that scheme."""
        return fnmatchcase(scheme, self.scheme)

    def names(self, kernel: KernelSpec) -> bool:
        """Whether the rule is about that kernel."""
        return fnmatchcase(kernel.name, self.kernel)


@attrs.frozen(kw_only=True)
class KernelRules:
    """The entries of `VT_KERNELS`, in the order given; none where it is unset."""

    rules: tuple[KernelRule, ...] = ()

    @classmethod
    def parse(cls, text: str, kernels: Iterable[KernelSpec], schemes: Iterable[str]) -> KernelRules:
        """The rules of the switch's text.

        Errors: SwitchError for an entry without a colon, and for a glob that matches no registered kernel or no
        scheme, with the nearest accepted names and how to list all.
        """
        kernel_names, scheme_names = sorted({kernel.name for kernel in kernels}), sorted(set(schemes))
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        return cls(rules=tuple(_parse(entry, kernel_names, scheme_names) for entry in entries))

    @classmethod
    def of(cls, text: str, registry: Registry) -> KernelRules:
        """`parse` with the kernels and schemes of the enabled plugins."""
        return cls.parse(text, [owned.record for owned in registry.kernels.values()], registry.schemes)

    def forbidding(self, kernel: KernelSpec, scheme: str) -> KernelRule | None:
        """The rule that forbids the kernel for the scheme, or None."""
        return next((r for r in self.rules if r.forbids and r.speaks_of(scheme) and r.names(kernel)), None)

    def forced(self, scheme: str, kernels: Collection[KernelSpec]) -> list[tuple[KernelRule, KernelSpec]]:
        """Which of these kernels are to compute the scheme, each with the rule that says so.

        A scheme glob such as `*` says nothing of a scheme that none of the kernels it names computes; a scheme
        spelled out does.
        """
        found: list[tuple[KernelRule, KernelSpec]] = []
        for rule in self.rules:
            if not rule.forbids and rule.speaks_of(scheme):
                named = [kernel for kernel in kernels if rule.names(kernel)]
                able = [kernel for kernel in named if _computes(kernel, scheme)]
                found += [(rule, kernel) for kernel in (able if able or _is_glob(rule.scheme) else named)]
        return found

    def notes(self, asked: Iterable[tuple[str, str]], kernels: Sequence[KernelSpec]) -> tuple[str, ...]:
        """One line for each rule and scheme of a load where the rule could do nothing.

        asked: the (op, scheme) of everything that was planned. The lines are stable and name the rule.
        """
        return tuple(line for line, _ in self._lines(asked, kernels))

    def in_vain(self, asked: Iterable[tuple[str, str]], kernels: Sequence[KernelSpec]) -> tuple[str, ...]:
        """Those of the notes that are fallbacks: weights of a scheme that a rule asks a kernel for, and have none.

        A rule that forbids, or that speaks of schemes the model does not have, takes nothing from any weight.
        """
        return tuple(line for line, is_fallback in self._lines(asked, kernels) if is_fallback)

    def _lines(
        self, asked: Iterable[tuple[str, str]], kernels: Sequence[KernelSpec]
    ) -> list[tuple[str, bool]]:
        """The notes, each with whether it is a fallback."""
        pairs = sorted(set(asked))
        lines: list[tuple[str, bool]] = []
        for rule in self.rules:
            found = [(op, scheme) for op, scheme in pairs if rule.speaks_of(scheme)]
            named = [k for k in kernels if rule.names(k) and k.op in {op for op, _ in found}]
            if not found:
                lines.append((f"{SWITCH}: '{rule.text}' matches no scheme of this model", False))
            elif not named:
                told = f"{SWITCH}: '{rule.text}' matches no kernel of an op of this model"
                lines.append((told, not rule.forbids))
            elif not rule.forbids:
                unserved = sorted(
                    {scheme for _, scheme in found if not any(_computes(k, scheme) for k in named)}
                )
                lines += [
                    (f"{SWITCH}: '{rule.text}' has no kernel for {scheme} weights; others are used", True)
                    for scheme in unserved
                ]
        return lines


NO_RULES = KernelRules()


def _parse(entry: str, kernels: list[str], schemes: list[str]) -> KernelRule:
    scheme, colon, kernel = (part.strip() for part in entry.partition(":"))
    forbids = kernel.startswith("!")
    kernel = kernel.removeprefix("!").strip()
    if not colon or not scheme or not kernel:
        raise SwitchError(
            f"{SWITCH} has an entry that is not `scheme:kernel`",
            seen=repr(entry),
            accepted="a comma-separated list of scheme:kernel or scheme:!kernel, each with * where wanted",
            fix=_with_colon(entry, kernel_names=kernels, scheme_names=schemes),
        )
    for what, glob, names in (("scheme", scheme, schemes), ("kernel", kernel, kernels)):
        if not any(fnmatchcase(name, glob) for name in names):
            raise _unknown(what, glob, entry, names)
    return KernelRule(scheme=scheme, kernel=kernel, forbids=forbids, text=entry)


def _unknown(what: str, glob: str, entry: str, names: list[str]) -> SwitchError:
    """The error for a glob that no name matches: the nearest names, and where all are listed."""
    word = "".join(letter for letter in glob if letter not in _GLOB)
    near = difflib.get_close_matches(word, names, n=_FEW_NAMES, cutoff=0.0)
    closest = difflib.get_close_matches(word, names, n=1)
    shown = ", ".join(names if len(names) <= _MOST_NAMES else near)
    more = f", ... (the nearest of {len(names)})" if len(names) > _MOST_NAMES else ""
    fix = f"did you mean {closest[0]}? " if closest else ""
    return SwitchError(
        f"{SWITCH} names a {what} that is not there",
        seen=f"{glob!r} in {entry!r}",
        accepted=f"{shown}{more}" if names else f"no {what} is registered",
        fix=f"{fix}`vtensors kernels` lists every kernel and its schemes",
    )


def _with_colon(entry: str, *, kernel_names: list[str], scheme_names: list[str]) -> str | None:
    """What to write instead of a kernel or a scheme alone."""
    if any(fnmatchcase(name, entry.removeprefix("!")) for name in kernel_names):
        return f"write *:{entry}"
    if any(fnmatchcase(name, entry) for name in scheme_names):
        return f"write {entry}:<kernel>; `vtensors kernels` lists them"
    return None


def _computes(kernel: KernelSpec, scheme: str) -> bool:
    return "*" in kernel.schemes or scheme in kernel.schemes


def _is_glob(text: str) -> bool:
    return not _GLOB.isdisjoint(text)
