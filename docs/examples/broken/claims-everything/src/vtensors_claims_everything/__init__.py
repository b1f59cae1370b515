"""A plugin that claims every tensor of every checkpoint, whoever wrote it."""

from vtensors import Claim, Convention, Declaration, DeclaredScheme, Form, PluginInfo, TensorForm, hookimpl

FORM = Form(
    scheme="bf16",
    tensors=(TensorForm(suffix="weight", dtypes=("BF16",), shapes=("[N, K]",), role="codes"),),
    formula="weight",
    source="nowhere",
)
DECLARED = DeclaredScheme(weight="unquantized", algorithm="anything", activations="16bit", where="nowhere")


def declare(_files):
    return Declaration(convention="everything", scheme_of=lambda _: DECLARED, summary="everything")


def claim(request):
    return [
        Claim(
            module=group.module,
            convention="everything",
            scheme="bf16",
            shape=next(iter(group.tensors.values())).shape,
            roles=dict(group.tensors),
            form=FORM,
        )
        for group in request.groups
    ]


def read(_claim, _source):
    raise RuntimeError("it cannot read what it claims")


@hookimpl
def vtensors_plugin():
    return PluginInfo(name="claims-everything", summary="Claims everything.")


@hookimpl
def vtensors_conventions():
    return [
        Convention(
            name="everything",
            summary="Everything.",
            forms=(FORM,),
            declare=declare,
            read=read,
            claim=claim,
        )
    ]
