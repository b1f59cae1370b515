"""What limits `linear_nvfp4_wgmma` on an H200: other rings and orders of products, and the kernel without its parts.

    python benchmarks/wgmma_limits.py [--shapes gate_up,down] [--tokens 64,48]

A part is cut out of the source before it is compiled, so the results of those lines are wrong on purpose: where a
time stays the same without a part, something else limits. Times as in wgmma_sweep.py. The clock is read while the
device is at work.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
from concurrent.futures import ThreadPoolExecutor

import attrs
import torch
from cuda_device import require_cuda
from torch import Tensor
from wgmma_sweep import ROTATED, SHAPES, microseconds, reference, weight

from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.launch import Launch, load_function
from vtensors_kernels.compiling.nvrtc import Toolkit, compile_source, find_toolkit
from vtensors_kernels.compiling.sources import Source, load_source
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.wgmma import LINEAR, TOLERANCE, WgmmaLinear, WgmmaWorkspace
from vtensors_kernels.nvfp4.wgmma_form import WgmmaForm, choose_form, width_of

# Part -> (what the source has, what takes its place).
PARTS = {
    "products": [
        (
            "multiply_warpgroup(sums, operands[u % kDepth][h], x + (2 * u + h) * (2 * kTokens));",
            "sums[2 * u + h] += __uint_as_float(operands[u % kDepth][h][0] ^ operands[u % kDepth][h][1] ^ "
            "operands[u % kDepth][h][2] ^ operands[u % kDepth][h][3]);",
        )
    ],
    "decode": [
        (
            "decode_word(low_words[u], low_scales[u / 2], row[0]);",
            "for (int p = 0; p < 4; ++p) row[0][p] = low_words[u];",
        ),
        (
            "decode_word(high_words[u], high_scales[u / 2], row[1]);",
            "for (int p = 0; p < 4; ++p) row[1][p] = high_words[u];",
        ),
    ],
    "x": [
        ("wait_barrier(base + Layout::kXFull + 8 * stage.index, stage.parity);", ""),
        ("for (unsigned place = work.begin; place < work.end; ++place, at.advance())", "while (false)"),
        ("if (++step == work.steps) step = 0;", ""),
        (
            "const unsigned full = base + Layout::kXFull + 8 * at.index;",
            "const unsigned full = base, place = 0;",
        ),
    ],
    "weights": [
        ("if (within == 0) wait_barrier(slot_full + 8 * slot.index, slot.parity);", ""),
        (
            "arrive_expecting(full, bytes);\n      copy_bulk_once(to, from, bytes, full, evict_first_policy());",
            "",
        ),
    ],
    "exchange": [
        ("if (!whole && !add_parts(", "if (!whole && work.begin == 1u << 31 && !add_parts("),
    ],
}
CUTS = (
    *(("products",), ("decode",), ("x",), ("weights",), ("exchange",), ("x", "weights")),
    *(
        ("x", "weights", "products"),
        ("x", "weights", "decode"),
        ("products", "decode"),
        ("x", "products", "decode"),
    ),
)


def variants(form: WgmmaForm) -> list[WgmmaForm]:
    """The form with other orders of products, rings, and both together."""
    orders = [(2, 1), (2, 2), (4, 4)]
    rings = {
        4: [(3, 2), (2, 2), (2, 3), (1, 4)],
        3: [(4, 2), (2, 2), (2, 3)],
        2: [(4, 3), (2, 3), (2, 4), (4, 2)],
    }
    made = [form, *(attrs.evolve(form, depth=depth, group=group) for depth, group in orders)]
    for chunk, slots in rings[form.warpgroups]:
        for depth, group in orders[:2]:
            made.append(attrs.evolve(form, chunk=chunk, slots=slots, depth=depth, group=group))
    return list(dict.fromkeys(made))


def without(parts: tuple[str, ...]) -> Source:
    """The kernel's source without those parts. Raises ValueError where the source no longer has one."""
    source = load_source(LINEAR)
    text = source.text
    for before, after in itertools.chain.from_iterable(PARTS[part] for part in parts):
        if text.count(before) != 1:
            raise ValueError(f"the source has {text.count(before)} of: {before}")
        text = text.replace(before, after)
    return Source(name=source.name, text=text)


def defines_of(form: WgmmaForm) -> dict[str, int]:
    """Every macro of a plain linear in bfloat16."""
    return {**form.defines, "VT_F16": 0, "VT_EPILOGUE": 0}


def use_image(image: bytes, linears: list[WgmmaLinear], tokens: int, form: WgmmaForm) -> None:
    """Let these linears launch another image of their kernel."""
    function = load_function(image, "linear_nvfp4_wgmma", "sm_90a", shared_bytes=form.shared_bytes)
    for linear in linears:
        width = linear._by_tokens[tokens]
        launch = Launch(
            function=function,
            grid=width.multiply.grid,
            block=(form.threads, 1, 1),
            arguments=11,
            shared_bytes=form.shared_bytes,
            dependent=True,
        )
        linear._by_tokens[tokens] = attrs.evolve(width, multiply=launch)


def clock() -> str:
    """Clock and power while the device is at work, by nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def run(
    name: str, copies: list[PackedNVFP4], tokens: int, toolkit: Toolkit, wanted: Tensor, x: Tensor
) -> None:
    """Every line of one matrix and number of tokens."""
    n, k = copies[0].shape
    count = torch.cuda.get_device_properties(0).multi_processor_count
    shipped = choose_form(n, k, width_of(tokens), count)
    workspace = WgmmaWorkspace(device=torch.device("cuda", 0))
    forms = variants(shipped)
    with ThreadPoolExecutor(max_workers=8) as pool:
        images = list(
            pool.map(
                lambda parts: compile_source(without(parts), "sm_90a", defines_of(shipped), toolkit), CUTS
            )
        )
    compile_many(
        [
            Wanted(
                source=LINEAR,
                name="linear_nvfp4_wgmma",
                defines=tuple(defines_of(form).items()),
                shared_bytes=form.shared_bytes,
            )
            for form in forms
        ],
        0,
    )
    shape = f"wg{shipped.warpgroups} cluster{shipped.cluster} blocks{shipped.blocks}"
    print(f"@ {name} M={tokens} {shape}, floor {copies[0].blocks.nbytes / 4.6e6:.1f} us", flush=True)

    def linears(form: WgmmaForm) -> list[WgmmaLinear]:
        return [
            WgmmaLinear(packed, torch.bfloat16, tokens=(tokens, tokens), workspace=workspace, forms=(form,))
            for packed in copies
        ]

    for form in forms:
        calls = linears(form)
        workspace.poison()
        error = float((calls[0](x).float() - wanted).norm() / wanted.norm())
        what = f"ring{form.chunk}x{form.slots} stages{form.stages} depth{form.depth}/{form.group}"
        wrong = "" if error < TOLERANCE else f" WRONG {error:.1e}"
        print(f"  {what:32s} {microseconds(calls, x):7.2f}{wrong}", flush=True)
    for parts, image in zip(CUTS, images, strict=True):
        calls = linears(shipped)
        use_image(image, calls, tokens, shipped)
        print(f"  without {' '.join(parts):24s} {microseconds(calls, x):7.2f}", flush=True)
        workspace.counters.zero_()
    calls = linears(shipped)
    for _ in range(4000):
        calls[0](x)
    print(f"  at work: {clock()}", flush=True)
    torch.cuda.synchronize()


def main() -> None:
    """Every matrix and number of tokens asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="gate_up,down")
    parser.add_argument("--tokens", default="64,48")
    options = parser.parse_args()
    require_cuda("sm_90a")
    toolkit = find_toolkit()
    if isinstance(toolkit, str):
        raise SystemExit(toolkit)
    for name in options.shapes.split(","):
        n, k, _ = SHAPES[name]
        packed = weight(n, k)
        others = max(1, int(ROTATED // packed.blocks.nbytes))
        copies = [packed, *(attrs.evolve(packed, blocks=packed.blocks.clone()) for _ in range(others))]
        x = torch.randn(64, k, device="cuda").bfloat16()
        wanted = reference(packed, x)
        for tokens in map(int, options.tokens.split(",")):
            run(name, copies, tokens, toolkit, wanted[:tokens], x[:tokens].contiguous())


if __name__ == "__main__":
    main()
