"""INT8 weights with one float32 scale per row: `weight` I8 [N, K], `weight_scale` F32 [N, 1]."""

from vtensors import Convention, Declaration, DeclaredScheme, Form, PluginInfo, Scheme, TensorForm, hookimpl
from vtensors.configs import ConfigFiles, string_list
from vtensors.matching import Matcher, glob_entry

from vtensors_int8_rows.kernel import KERNEL

SCHEME = Scheme(
    name="int8-row",
    summary="INT8 codes and a float32 scale per output row.",
    bits_per_weight="8 + 32/K",
    weight_class="vtensors_int8_rows.weight:Int8RowWeight",
)

FORM = Form(
    scheme=SCHEME.name,
    tensors=(
        TensorForm(suffix="weight", dtypes=("I8",), shapes=("[N, K]",), role="codes"),
        TensorForm(
            suffix="weight_scale", dtypes=("F32",), shapes=("[N, 1]",), role="scale", sense="multiplies"
        ),
    ),
    formula="weight * weight_scale",
    source="this package",
)


def declare(files: ConfigFiles) -> Declaration | None:
    """What config.json says, if it is ours: every module is INT8 except those that `ignore` names."""
    block = next((block for block in files.blocks() if block.quant_method == "int8-rows"), None)
    if block is None:
        return None
    entries = string_list(block.values, "ignore", block.where)
    ignored = Matcher(entries=tuple(glob_entry(entry, block.where) for entry in entries))
    int8 = DeclaredScheme(weight="int8-row", algorithm="int8-rows", activations="16bit", where=block.where)

    def scheme_of(module: str) -> DeclaredScheme | None:
        return None if ignored.find(module) else int8

    return Declaration(convention="int8-rows", scheme_of=scheme_of, matchers=(ignored,), summary="int8-rows")


def read(claim, source):
    """The claim's Weight. torch is imported here and not above, so that `vtensors inspect` stays quick."""
    from vtensors_int8_rows.weight import Int8RowWeight

    return Int8RowWeight(codes=source.view(claim.roles["codes"]), scale=source.view(claim.roles["scale"]))


CONVENTION = Convention(
    name="int8-rows",
    summary="INT8 weights with a scale per row.",
    forms=(FORM,),
    declare=declare,
    read=read,
    quant_methods=("int8-rows",),
)


@hookimpl
def vtensors_plugin():
    return PluginInfo(name="int8-rows", summary="INT8 weights with a scale per row.")


@hookimpl
def vtensors_schemes():
    return [SCHEME]


@hookimpl
def vtensors_conventions():
    return [CONVENTION]


@hookimpl
def vtensors_kernels():
    return [KERNEL]
