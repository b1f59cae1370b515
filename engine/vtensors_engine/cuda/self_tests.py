"""The kernels between the linears, tested on the device before a sequence depends on them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vtensors.self_test_runs import Runner, require_end
from vtensors_engine.cuda.layers import AttentionMixer, DeltaNetMixer
from vtensors_kernels.steps.gated_delta_probe import probe_gated_delta_net
from vtensors_kernels.steps.next_token import probe_next_token
from vtensors_kernels.steps.paged_attention_probe import probe_paged_attention
from vtensors_kernels.steps.rms_norm import probe_rms_norm
from vtensors_kernels.steps.sample_token import MAX_COLUMNS, probe_sample_token

if TYPE_CHECKING:
    from vtensors_engine.cuda.paged_decoder import PagedDecoder


def require_kernels(model: PagedDecoder, run: Runner) -> None:
    """Runs each kernel of the kinds of layers that the model has on small random data against its reference.

    Raises VtensorsError where one fails, DeviceError where one does not end in time. Layers of one kind are alike but
    for their weights: the first is tested. run: a `TimeLimit`.
    """
    decoder = model.decoder
    dtype, device = decoder.dtype, decoder.device
    columns, eps = decoder.norm.weight.shape[0], decoder.norm.eps
    require_end(run, lambda: probe_rms_norm(columns, eps, dtype, device), "the norm kernel")
    require_end(
        run, lambda: probe_next_token(decoder.vocab_size, dtype, device), "the kernel of the next token"
    )
    if decoder.vocab_size <= MAX_COLUMNS:
        require_end(run, lambda: probe_sample_token(decoder.vocab_size, dtype, device), "the sampling kernel")
    mixers = [layer.mixer for layer in model.layers]
    for attention in [mixer for mixer in mixers if isinstance(mixer, AttentionMixer)][:1]:
        require_end(run, partial(probe_paged_attention, attention.kernel), "paged attention")
    for delta_net in [mixer for mixer in mixers if isinstance(mixer, DeltaNetMixer)][:1]:
        require_end(run, partial(probe_gated_delta_net, delta_net.kernel), "the gated delta net")
