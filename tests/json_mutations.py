"""Damage to JSON documents that keeps them JSON: a value of another type, a huge one, a key moved or doubled.

Import as `from json_mutations import mutate_json`.
"""

from __future__ import annotations

import copy
import random
from typing import Any

# One of every type, and numbers at the borders of what readers take for granted.
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    16,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e300,
    "",
    "x",
    "re:(a+)+$",
    "re:(",
    "*a*a*a*b",
    "NVFP4",
    "FP8",
    "MIXED_PRECISION",
    "float",
    "dynamic",
    "block",
    "\u0000",
    "\u202e",
    "..",
    "../../etc/passwd",
    [],
    {},
    [[]],
    [None],
    [0],
    [128, 128],
    [-1, 0],
    [True, True],
    ["x", 1],
    {"": None},
    {"x": {}},
    {"quant_algo": ["NVFP4"]},
)


def mutate_json(value: Any, random_source: random.Random, *, times: int = 1) -> Any:
    """A copy of the document in which `times` places hold something else."""
    document = copy.deepcopy(value)
    for _ in range(times):
        document = _mutate_once(document, random_source)
    return document


def paths_of(value: Any) -> list[tuple[Any, ...]]:
    """The keys and indices that lead to every value below the outermost one."""
    found: list[tuple[Any, ...]] = []
    stack: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while stack:
        path, owner = stack.pop()
        keys = (
            list(owner) if isinstance(owner, dict) else range(len(owner)) if isinstance(owner, list) else ()
        )
        for key in keys:
            found.append((*path, key))
            stack.append(((*path, key), owner[key]))
    return found


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """A copy of the document with `other` at the path."""
    document = copy.deepcopy(value)
    if not path:
        return other
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = other
    return document


def _mutate_once(document: Any, random_source: random.Random) -> Any:
    paths = paths_of(document)
    if not paths:
        return copy.deepcopy(random_source.choice(ODD_VALUES))
    path = random_source.choice(paths)
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    kind = random_source.randrange(6)
    if kind == 0:
        del owner[path[-1]]
    elif kind == 1 and isinstance(owner, dict):
        owner[random_source.choice([str(p[-1]) for p in paths])] = owner.pop(path[-1])
    elif kind == 2:
        other = random_source.choice(paths)
        found = document
        for key in other:
            found = found[key] if isinstance(found, dict | list) and _holds(found, key) else None
        owner[path[-1]] = copy.deepcopy(found)
    elif kind == 3 and isinstance(owner[path[-1]], list):
        owner[path[-1]].append(copy.deepcopy(random_source.choice(ODD_VALUES)))
    elif kind == 4 and isinstance(owner[path[-1]], int):
        owner[path[-1]] += random_source.choice((-1, 1, 2**31, -(2**31)))
    else:
        owner[path[-1]] = copy.deepcopy(random_source.choice(ODD_VALUES))
    return document


def _holds(owner: dict[Any, Any] | list[Any], key: Any) -> bool:
    return key in owner if isinstance(owner, dict) else isinstance(key, int) and key < len(owner)
