"""The text of docs/conventions.md, written from the records by which conventions claim weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vtensors.forms import ANY_SHAPE, Form, TensorForm
from vtensors.records import Convention
from vtensors_plugins.commands.conventions_facts import (
    activation_table,
    kv_scale_table,
    refused_tables,
    stacked_table,
    table,
    waiver_table,
)

_HEAD = """# Conventions

A convention is how a publisher spells a weight on disk. Each table below is a spelling that is accepted, for any
module: `lm_head`, the embeddings and a router are modules like any other, and one checkpoint may mix them all.
These tables are the records by which weights are claimed, so an error message, this page and the code cannot
disagree. `vtensors conventions` shows those of the installed plugins too, and `vtensors inspect --module REGEX`
tells which one a module of a checkpoint fits.

This file is written by `vtensors conventions --markdown`; `make docs` runs it.

## How to read the tables

- A module's name is a tensor's name up to its last point; the **tensor** column is what follows. A float tensor
  that is nobody's `weight` or `bias`, such as `A_log`, is a module by its full name.
- **dtype** is the name in the safetensors header. `F8_E8M0`, or the same bytes as `U8`, are exponents of two.
- In a **shape**, N is the number of output features (rows) and K the number of input features; E counts the
  experts of a stacked tensor; BN and BK are the rows and columns of one scale block, 128 unless declared.
  `[]` is a single value, `[*]` any shape. `one block:` before a shape means that it is accepted only where the
  whole matrix is one block, whose scale writers collapse.
- A scale whose **sense** is *multiplies* is a factor of the weight; one that *divides* is a divisor. Both are
  kept as stored, since the inverse of a divisor is not exact.
- A tensor in parentheses may be absent. Every tensor of a module must have its place in one table: a surplus
  one, like a missing one, another dtype or another shape, is refused by name.
- Tensors alone do not tell who wrote them: a quantized convention claims a module only where the configuration
  (`quantization_config` of config.json, at the top or in `text_config`, or `hf_quant_config.json`) declares it.
  Where the declared algorithm and the tensors disagree, the tensors win and the conflict is reported.
- **declared as** names the publisher's own words, in lower case; those of compressed-tensors are a format and,
  behind a colon, the strategy of its scales.
- A matrix of experts may be stored one by one or stacked; each expert is a module of its own either way."""

_STACKED = """## Stacked experts

An expert inside a 3-D tensor has the name that it would have alone. Below `mlp.experts` the tensors of all
experts may be spelled with a point or an underscore:"""

_STACKED_NAMES = """With two experts, `mlp.experts.gate_up_proj` is read as these modules, the gate being the first half
of its rows: {names}.

Where a table says `[E, K/2, N]`, rows and columns are swapped on disk and put right on reading."""

_KV = """## KV-cache scales

These names are accepted below an attention module, in any convention. Each holds one value
that multiplies: K = stored * scale. One of `k` and `v` alone serves both; a value that is zero, negative or NaN
counts as absent, 1.0. Two names for one scale are an error, and so are scales per head and an
affine cache (`k_bias`, `v_bias`) where FP8 is asked for."""

_WAIVED = """## Waived tensors

A tensor that a text model does not need is waived by name, with a reason that `vtensors inspect` shows. Every
other tensor must be claimed."""

_ACTIVATIONS = """## Activations

What is declared and what is executed are two facts, and `vtensors inspect` shows both. The argument
`activations` (or `--activations`) decides first, then the switch, then weight-only (`16bit`). `VT_FP8_W8A8=1`
acts on FP8 modules beside `"fp4"` too."""

_REFUSED = """## Recognized and refused

These are refused by name, so that nobody takes them for something else; a plugin can add one
([writing a plugin](writing-a-plugin.md))."""


def page(conventions: Iterable[Convention]) -> str:
    """The whole page: how to read it, the conventions, and what holds for all of them."""
    stacked, names = stacked_table()
    shown = ", ".join(f"`{name}`" for name in names[:-1]) + f" and `{names[-1]}`"
    return "\n\n".join(
        (
            _HEAD,
            sections(record for record in conventions if record.forms),
            _STACKED,
            stacked,
            _STACKED_NAMES.format(names=shown),
            _KV,
            kv_scale_table(),
            _WAIVED,
            waiver_table(),
            _ACTIVATIONS,
            activation_table(),
            _REFUSED,
            refused_tables(),
        )
    )


def sections(conventions: Iterable[Convention]) -> str:
    """A section per convention: who declares it, then a table per accepted form."""
    return "\n\n".join("\n\n".join(_section(convention)) for convention in conventions)


def _section(convention: Convention) -> list[str]:
    lines = [f"## {convention.name}", convention.summary]
    if convention.quant_methods:
        methods = ", ".join(f"`{method}`" for method in convention.quant_methods)
        lines.append(f"Declared by `quant_method`: {methods}.")
    else:
        lines.append("Needs no declaration.")
    if convention.overrides:
        lines.append(f"Goes before {', '.join(convention.overrides)} where both claim a tensor.")
    titles = [_title(form) for form in convention.forms]
    for form, title in zip(convention.forms, titles, strict=True):
        if titles.count(title) > 1:
            title += f", {_scale_words(form)}"
        lines += [f"### {convention.name}: {title}", _facts(form), _form_table(form.tensors)]
    return lines


def _scale_words(form: Form) -> str:
    """The scale's name and dtypes, which tell apart two forms of one scheme."""
    scale = next((tensor for tensor in form.tensors if tensor.sense), form.tensors[0])
    return f"`{scale.suffix}` {' or '.join(scale.dtypes)}"


def _title(form: Form) -> str:
    codes = form.tensors[0].shapes[0]
    kind = {"[E, K": ", experts stacked, transposed", "[E, N": ", experts stacked"}.get(codes[:5], "")
    if codes == ANY_SHAPE:
        kind = ", any rank"
    return f"{form.scheme}{kind}"


def _facts(form: Form) -> str:
    words = ", ".join(f"`{word}`" for word in form.algorithms)
    declared = f"declared as {words}" if words else "whatever is declared"
    return f"weight = `{form.formula}`; {declared}. Source: {form.source}."


def _form_table(tensors: Sequence[TensorForm]) -> str:
    rows = [
        (
            f"`{tensor.suffix}`" if tensor.required else f"(`{tensor.suffix}`)",
            ", ".join(tensor.dtypes),
            " or ".join(f"`{shape}`" for shape in tensor.shapes),
            tensor.role,
            tensor.sense or "-",
        )
        for tensor in tensors
    ]
    return table(("tensor", "dtype", "shape", "role", "sense"), rows)
