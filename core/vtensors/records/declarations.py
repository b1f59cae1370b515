"""What configuration files say: declared schemes, contradictions, the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from vtensors.matching import Matcher


@attrs.frozen(kw_only=True)
class DeclaredScheme:
    """What the configuration says of one module.

    weight: `nvfp4`, `fp8`, `mxfp8`, `unquantized`, or another family name in the publisher's spelling.
    algorithm: the publisher's own word, for example `W4A16_NVFP4` or `float-quantized`.
    activations: `16bit`, `fp4`, `fp8-static` or `fp8-dynamic`.
    where: the file and key that say so.
    explicit: the module is named by the entry itself (not by a class such as `Linear` or a catch-all).
    block: rows and columns of a scale block, where declared.
    group_size: elements of K per scale, where declared.
    """

    weight: str
    algorithm: str
    activations: str
    where: str
    explicit: bool = False
    block: tuple[int, int] | None = None
    group_size: int | None = None


@attrs.frozen(kw_only=True)
class Conflict:
    """Two statements that cannot both hold, and which one was followed.

    where: file, key or module; says: the statement not followed; instead: the other one; chosen: what was
    done and why. modules: how many modules it concerns.
    """

    where: str
    says: str
    instead: str
    chosen: str
    modules: int = 1


@attrs.frozen(kw_only=True)
class KvCacheDeclared:
    """What the configuration says of the KV cache: algorithm as written (`FP8`), and where."""

    algorithm: str
    where: str


@attrs.frozen(kw_only=True)
class Declaration:
    """One convention's reading of the configuration files.

    scheme_of: module name -> DeclaredScheme; None where the declaration says nothing of the module.
    matchers: the ignore and target lists, which remember the entries that matched something.
    summary: one line for people, for example `modelopt 0.45.0 MIXED_PRECISION`.
    """

    convention: str
    scheme_of: Callable[[str], DeclaredScheme | None]
    summary: str
    kv_cache: KvCacheDeclared | None = None
    conflicts: tuple[Conflict, ...] = ()
    matchers: tuple[Matcher, ...] = ()
    warnings: tuple[str, ...] = ()
