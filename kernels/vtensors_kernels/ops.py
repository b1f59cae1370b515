"""The closed list of ops that a model may call, each with its contract. Torch-free.

Letters: M rows, N output, K input features; T tokens of one sequence, S tokens in its cache; H heads, KV
key-value heads, D head size, R rotated part of it; HK and HV key and value heads of a delta net, DK and DV
their sizes; C channels, W taps of a convolution; V vocabulary, E experts, F their width. "model dtype" is the
dtype of the activations: bfloat16, float16 or float32. Every op computes in float32 and rounds once to what it
returns.

A fused op computes the ops of its decomposition one after the other. Its reference rounds behind each of them; a
kernel may keep float32 in between. `bind` is given the weights of its parts, in the order of the rows that they
give; all have one scheme and one K, each keeps its own scales, and a bias either all have or none.
"""

from __future__ import annotations

import attrs

from vtensors.errors import RequestError


@attrs.frozen(kw_only=True)
class Op:
    """One op. A kernel names it in `KernelSpec.op`.

    contract: arguments, shapes, dtypes and result, in words and one formula.
    reference: dotted path `package.module:function` of the implementation that is the op's specification.
    decomposition: for a fused op, the ops that together compute the same, in order; empty for a plain op.
    """

    name: str
    contract: str
    reference: str
    decomposition: tuple[str, ...] = ()


OPS: tuple[Op, ...] = (
    Op(
        name="linear",
        contract=(
            "bind(weight, request) -> call(x). x [M, K] model dtype -> [M, N] model dtype: "
            "y = q(x * pre_scale) @ W.T + bias. weight is an [N, K] Weight of any scheme, pre_scale [K] and "
            "bias [N] are its own where it has them, q is its activation quantizer unless the request says "
            "`16bit`."
        ),
        reference="vtensors_kernels.reference.linear:linear",
    ),
    Op(
        name="linears",
        contract=(
            "bind(weights, request) -> call(x). x [M, K] model dtype -> [M, N] model dtype: `linear` of each "
            "part over the same x, side by side; request.parts are their widths, N the sum."
        ),
        reference="vtensors_kernels.reference.linears:linears",
        decomposition=("linear",),
    ),
    Op(
        name="linear_swiglu",
        contract=(
            "bind((gate, up), request) -> call(x). x [M, K] model dtype -> [M, N / 2] model dtype: "
            "silu(linear(x, gate)) * linear(x, up); request.parts = (N / 2, N / 2)."
        ),
        reference="vtensors_kernels.reference.linear_swiglu:linear_swiglu",
        decomposition=("linears", "swiglu"),
    ),
    Op(
        name="linear_add",
        contract=(
            "bind(weight, request) -> call(x, residual). x [M, K], residual [M, N] model dtype -> [M, N] model "
            "dtype: residual + linear(x)."
        ),
        reference="vtensors_kernels.reference.linear_add:linear_add",
        decomposition=("linear", "add"),
    ),
    Op(
        name="norm_linears",
        contract=(
            "bind(weights, request) -> call(x, gain, eps). x [M, K] model dtype, gain [K] float32 (with its + 1 "
            "where the norm is zero-centred), eps -> [M, N] model dtype: `linears` of "
            "x * rsqrt(mean(x^2) + eps) * gain."
        ),
        reference="vtensors_kernels.reference.linears:norm_linears",
        decomposition=("rms_norm", "linears"),
    ),
    Op(
        name="norm_linear_swiglu",
        contract=(
            "bind((gate, up), request) -> call(x, gain, eps). x [M, K] model dtype, gain [K] float32 (with its "
            "+ 1 where the norm is zero-centred), eps -> [M, N / 2] model dtype: `linear_swiglu` of "
            "x * rsqrt(mean(x^2) + eps) * gain."
        ),
        reference="vtensors_kernels.reference.linear_swiglu:norm_linear_swiglu",
        decomposition=("rms_norm", "linear_swiglu"),
    ),
    Op(
        name="linear_argmax",
        contract=(
            "bind(weight, request) -> call(x). x [M, K] model dtype -> [M] int64: the index of the largest "
            "entry of `linear`, after it was rounded to the model dtype; the lowest among equal ones."
        ),
        reference="vtensors_kernels.reference.linear_argmax:linear_argmax",
        decomposition=("linear", "argmax"),
    ),
    Op(
        name="experts",
        contract=(
            "bind(weights, request) -> call(x, chosen, router, gate, shared, residual). x [M, K] model dtype, "
            "chosen [M, top] integers, different ones for a token, router [M, top] float32 -> [M, K] model dtype: "
            "residual + sum_s router[:, s] * down(silu(gate(x)) * up(x)) of expert chosen[:, s] + sigmoid(gate) * "
            "shared. weights are gate, up [F, K] and down [K, F] of request.experts experts in turn and, with the "
            "trait `shared_expert`, of the one that every token has, whose output is then not given as `shared` "
            "[M, K] model dtype. gate [M, 1] model dtype are the logits of its weight, which is 1 without them. "
            "gate, shared and residual [M, K] may be None. request.shape is (2 F, K), request.parts (F, F, K), "
            "request.chosen top; each weight has its own activation quantizer unless the request says `16bit`."
        ),
        reference="vtensors_kernels.reference.experts:experts",
        decomposition=("linear", "swiglu"),
    ),
    Op(
        name="embedding",
        contract=(
            "bind(weight, request) -> call(ids, dtype). ids [T] int64 -> [T, K] dtype: row ids[t] of a "
            "[V, K] Weight of any scheme; only the rows asked for are dequantized."
        ),
        reference="vtensors_kernels.reference.embedding:embedding",
    ),
    Op(
        name="rms_norm",
        contract=(
            "x [..., D] model dtype, weight [D] float32, eps -> [..., D] model dtype: "
            "y = x * rsqrt(mean(x^2) + eps) * g, g = 1 + weight for a zero-centred norm and weight for a "
            "plain one; the 1 is added in float32."
        ),
        reference="vtensors_kernels.reference.rms_norm:rms_norm",
    ),
    Op(
        name="gated_rms_norm",
        contract=(
            "x, gate [..., D] model dtype, weight [D] float32, eps -> [..., D] model dtype: "
            "y = x * rsqrt(mean(x^2) + eps) * weight * silu(gate); the weight is plain."
        ),
        reference="vtensors_kernels.reference.gated_rms_norm:gated_rms_norm",
    ),
    Op(
        name="rope",
        contract=(
            "x [T, H, D] model dtype, cos and sin [T, R / 2] float32 -> [T, H, D] model dtype: for i < R / 2 "
            "(x[i], x[i + R/2]) is turned by the angle of frequency i; x[R:] passes through."
        ),
        reference="vtensors_kernels.reference.rope:rope",
    ),
    Op(
        name="attention",
        contract=(
            "q [T, H, D], keys and values [KV, S, D] model dtype, scale -> [T, H, D] float32: query t is at "
            "position S - T + t and sees positions up to its own; query head j reads key-value head "
            "j // (H / KV); softmax(q @ k.T * scale) @ v."
        ),
        reference="vtensors_kernels.reference.attention:attention",
    ),
    Op(
        name="causal_conv1d",
        contract=(
            "x [T, C] model dtype, weight [C, W] float32, history [W - 1, C] model dtype (the last raw "
            "inputs, oldest first, zeros at the start) -> y [T, C] model dtype and the new history: "
            "y[t] = silu(sum_j weight[:, j] * x[t - W + 1 + j])."
        ),
        reference="vtensors_kernels.reference.causal_conv1d:causal_conv1d",
    ),
    Op(
        name="gated_delta_rule",
        contract=(
            "q, k [T, HK, DK], v [T, HV, DV] model dtype, g (log decay, <= 0) and beta [T, HV] float32, "
            "state S [HV, DK, DV] float32 -> o [T, HV, DV] float32 and the new state. q and k are scaled to "
            "length 1, q then by DK^-0.5; value head j uses key head j // (HV / HK); per token S = e^g S, "
            "S = S + k (beta (v - S^T k))^T, o = S^T q."
        ),
        reference="vtensors_kernels.reference.gated_delta_rule:gated_delta_rule",
    ),
    Op(
        name="router_topk",
        contract=(
            "logits [T, E] model dtype, k -> experts [T, k] int64 and weights [T, k] float32: the k largest "
            "logits, the lowest index first among equal ones; weights are their softmax over all E, divided "
            "by their sum."
        ),
        reference="vtensors_kernels.reference.router_topk:router_topk",
    ),
    Op(
        name="swiglu",
        contract="gate, up [M, N] model dtype -> [M, N] model dtype: silu(gate) * up.",
        reference="vtensors_kernels.reference.swiglu:swiglu",
    ),
    Op(
        name="add",
        contract="residual, y [M, N] model dtype -> [M, N] model dtype: residual + y.",
        reference="vtensors_kernels.reference.linear_add:add",
    ),
    Op(
        name="argmax",
        contract="logits [M, V] model dtype -> [M] int64: the largest, the lowest index among equal ones.",
        reference="vtensors_kernels.reference.linear_argmax:argmax",
    ),
)


def op(name: str) -> Op:
    """The op of that name. Raises RequestError naming the known ones."""
    for known in OPS:
        if known.name == name:
            return known
    raise RequestError(
        f"unknown op '{name}'",
        seen=name,
        accepted=", ".join(known.name for known in OPS),
        fix="use a known op",
    )
