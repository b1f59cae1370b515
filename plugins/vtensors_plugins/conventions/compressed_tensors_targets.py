"""compressed-tensors' targets: which group of arguments speaks of a module."""

from __future__ import annotations

import attrs

from vtensors.matching import Matcher
from vtensors.records import DeclaredScheme

_EMBEDDINGS = ("embed_tokens", "embeddings", "wte", "tok_embeddings")


@attrs.frozen(kw_only=True)
class Group:
    """One of config_groups. targets: names and regexes. classes: module classes among the targets."""

    name: str
    scheme: DeclaredScheme
    targets: Matcher
    classes: tuple[str, ...]


@attrs.define
class Resolver:
    """The declared scheme of each module. ignore: modules that no group speaks of. where: the block."""

    groups: tuple[Group, ...]
    ignore: Matcher
    where: str
    _unquantized: dict[str, DeclaredScheme] = attrs.field(init=False, factory=dict)
    _explicit: dict[str, DeclaredScheme] = attrs.field(init=False, factory=dict)

    def scheme_of(self, module: str) -> DeclaredScheme | None:
        """ignore first, then targets by exact name, by regex, and by class (any class that may be a linear).

        Of several regexes the first by alphabet counts, and of one target in two groups the later group, as in
        compressed-tensors 0.20 utils/match.py and quantization/lifecycle/apply.py.
        """
        entry = self.ignore.find(module)
        if entry is not None:
            return self._plain(f"{entry.where}: '{entry.text}'")
        named = [
            (not entry.exact, entry.text, -number)
            for number, group in enumerate(self.groups)
            if (entry := group.targets.find(module)) is not None
        ]
        if named:
            group = self.groups[-min(named)[2]]
            if group.name not in self._explicit:
                self._explicit[group.name] = attrs.evolve(group.scheme, explicit=True)
            return self._explicit[group.name]
        last = module.rpartition(".")[2]
        for group in reversed(self.groups):
            wanted = "Embedding" if last in _EMBEDDINGS else "Linear"
            if any(wanted in name for name in group.classes):
                return group.scheme
        return self._plain(f"{self.where}: no target matches")

    def _plain(self, where: str) -> DeclaredScheme:
        if where not in self._unquantized:
            self._unquantized[where] = DeclaredScheme(
                weight="unquantized",
                algorithm="unquantized",
                activations="16bit",
                where=where,
                explicit="ignore" in where,
            )
        return self._unquantized[where]
