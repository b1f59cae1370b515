"""The kernel `linear_int8_rows`: y = (x @ codes.T) * scale, the codes widened a call at a time."""

from vtensors import KernelSpec


def refuse(request):
    """Why not, in one line, or None. The shape may be unknown (None): then refuse only what no shape would mend."""
    if request.activations != "16bit":
        return f"takes 16-bit activations, not {request.activations}"
    traits = request.traits & {"bias", "pre_scale"}
    return f"knows no {' and no '.join(sorted(traits))}" if traits else None


def cost(request):
    """Microseconds for request.tokens[0] rows; here of a device that moves 1 TB/s."""
    return 5.0 if request.shape is None else 5.0 + 9e-6 * request.shape[0] * request.shape[1]


def bind(weight, request):
    """What the layer calls with x [M, K]. Everything that can be done once is done here."""
    codes, scale = weight.codes, weight.scale.t()

    def call(x):
        return ((x.float() @ codes.float().t()) * scale).to(x.dtype)

    return call


def probe(request):
    """Launch what bind gives on a small weight of the same K and hold it against the scheme's own values."""
    import torch

    from vtensors_int8_rows.weight import Int8RowWeight

    random, k = torch.Generator().manual_seed(0), request.shape[1]
    codes = torch.randint(-127, 128, (48, k), generator=random, dtype=torch.int8)
    weight = Int8RowWeight(codes=codes, scale=torch.rand(48, 1, generator=random) + 0.5).to(request.device)
    x = torch.randn(request.tokens[0], k, generator=random).to(request.device, getattr(torch, request.dtype))
    expected = x.float() @ weight.dequantize(torch.float32).t()
    error = (bind(weight, request)(x).float() - expected).norm() / expected.norm()
    if not error < 1e-2:  # a NaN fails too
        raise RuntimeError(f"relative error {error:.2g}, accepted: below 1e-2")


def fingerprint(request):
    """What the probe's outcome depends on besides this package's version, the card and the driver."""
    import torch

    return f"torch {torch.__version__}"


KERNEL = KernelSpec(
    name="linear_int8_rows",
    op="linear",
    schemes=("int8-row",),
    targets=("portable",),
    numerics="float32 sums, rounded once",
    refuse=refuse,
    bind=bind,
    cost=cost,
    probe=probe,
    fingerprint=fingerprint,
)
