"""What a probe of all sites costs, in plain forward + backward passes on the same samples.

    python benchmarks/probe_cost.py                 the table (about 25 minutes, one thread)
    python benchmarks/probe_cost.py --quick         fewer pairs and samples

The probe sees n held-out and n training samples; the plain pass sees the same 2 n samples in the same
batches and computes all weight gradients. Times are medians over interleaved pairs, in one process.
Candidates are blocks as wide as the network's own: copies of the neighbours (the default), or random draws.
Memory is the peak of a process that probes, less the peak of one that trains, beside the sum of what a probe
is allowed to keep: D x K and K x K numbers a site, 4,096 numbers a chunk, and one batch of streams and features.
Both processes give freed blocks back at once (glibc's MALLOC_MMAP_THRESHOLD_ is fixed at 128 KiB): left to itself the
allocator keeps what was freed, and the same run peaks anywhere between 60 and 108 MiB.
GroMo 0.1.0 (extra ``peers``) gathers the statistics of one empty linear block a site, where it runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growth_service.blocks.projections import projection_shape
from growth_service.models import build
from growth_service.probing import probe
from growth_service.probing.prepare import MAX_CHUNKS

Batches = list[tuple[Tensor, Tensor]]


class Case(NamedTuple):
    """A network and how it is probed."""

    name: str
    spec: dict[str, Any]
    samples: int
    """Held-out samples, and as many training samples."""
    batch: int


def mlp(width: int, num_sites: int, samples: int, batch: int) -> Case:
    """A residual MLP on inputs of the size of Fashion-MNIST's; the stem's output is a site too."""
    spec = {
        "family": "mlp", "input_shape": [1, 28, 28], "num_classes": 10, "widths": [width],
        "blocks": [num_sites - 1], "hidden": [2 * width],
    }  # fmt: skip
    return Case(f"residual MLP, {num_sites} sites, d {width}", spec, samples, batch)


CASES = (
    mlp(64, 4, 16384, 1024),
    mlp(64, 32, 16384, 1024),
    mlp(256, 4, 16384, 1024),
    mlp(256, 32, 16384, 512),
    Case(
        "CNN, 7 sites (16x16 images, widths 16 and 32)",
        {
            "family": "resnet", "input_shape": [3, 16, 16], "num_classes": 10, "widths": [16, 32], "blocks": [3, 2],
            "hidden": [16, 32], "stem_stride": 1, "group_size": 4,
        },
        2048,
        128,
    ),
    Case(
        "char-GPT, 4 layers (d 128, 4 heads, context 64)",
        {
            "family": "gpt", "vocab": 96, "context": 64, "widths": [128], "blocks": [4], "hidden": [512], "heads": 4,
            "positions": "learned",
        },
        1024,
        32,
    ),
)  # fmt: skip


def data(case: Case) -> Batches:
    """Random inputs and labels: what is measured does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    num = 2 * case.samples
    if case.spec["family"] == "gpt":
        tokens = torch.randint(0, case.spec["vocab"], (num, case.spec["context"] + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    else:
        inputs = torch.randn(num, *case.spec["input_shape"], generator=generator)
        targets = torch.randint(0, case.spec["num_classes"], (num,), generator=generator)
    return list(zip(inputs.split(case.batch), targets.split(case.batch), strict=True))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of classes or tokens."""
    return nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def train(model: nn.Module, batches: Batches) -> None:
    """Plain forward and backward, with all weight gradients."""
    for inputs, targets in batches:
        model.zero_grad(set_to_none=True)
        loss(model(inputs), targets).backward()


def look(model: nn.Module, batches: Batches, inner: str) -> Any:
    """A whole probe: half of the samples held out, half of training."""
    half = len(batches) // 2
    return probe(model, batches=batches[:half], train_batches=batches[half:], loss=loss, reduction="mean", inner=inner)  # type: ignore[arg-type]


def ratio(first: Callable[[], Any], second: Callable[[], Any], *, pairs: int) -> tuple[float, float, float]:
    """Medians over interleaved pairs: seconds of both, and of the ratio second / first."""
    first(), second()
    seconds = []
    for _ in range(pairs):
        start = time.perf_counter()
        first()
        middle = time.perf_counter()
        second()
        seconds.append((middle - start, time.perf_counter() - middle))
    return (
        statistics.median(a for a, _ in seconds),
        statistics.median(b for _, b in seconds),
        statistics.median(b / a for a, b in seconds),
    )


def gromo_statistics(case: Case, batches: Batches) -> Callable[[], None] | None:
    """GroMo's statistics of one empty linear block after every block of the same residual MLP, or None."""
    if case.spec["family"] != "mlp":
        return None
    try:
        from gromo.containers.growing_block import LinearGrowingBlock
    except ImportError:
        return None
    model = build(case.spec, seed=0)
    width = case.spec["widths"][0]
    group = model.groups[0]
    places = [LinearGrowingBlock(width, width, hidden_features=0, pre_activation=nn.LayerNorm(width)).to("cpu")
              for _ in range(case.spec["blocks"][0] + 1)]  # fmt: skip

    def forward(inputs: Tensor) -> Tensor:
        z = places[0](group.entry(inputs.flatten(1)))
        for block, place in zip(group.blocks, places[1:], strict=True):
            z = place(block(z))
        out: Tensor = model.head(model.norm(z))
        return out

    def gather() -> None:
        for place in places:
            place.init_computation()
        for inputs, targets in batches:
            model.zero_grad(set_to_none=True)
            loss(forward(inputs), targets).backward()
            for place in places:
                place.update_computation(update_covariance_loss_gradient=False)
        for place in places:
            place.compute_optimal_updates()
            place.first_order_improvement  # noqa: B018 - a property that computes
            place.delete_update()
            place.reset_computation()

    return gather


def allowed_mib(case: Case) -> float:
    """What a probe may keep above training: matrices and rows in double precision, and one batch in single.

    Of a batch: the stream, its copy and its gradient, and the features of the candidate, at every site.
    """
    model, batches = build(case.spec, seed=0), data(case._replace(samples=case.batch))
    report = look(model, batches, "copy")
    positions = stream_positions_of(case)
    kept = batch = 0
    for site, block in report.blocks.items():
        rows, features = projection_shape(block.project)
        inputs = features // (9 if case.spec["family"] == "resnet" else 1)
        kept += rows * features + features * features + 4096 * MAX_CHUNKS
        batch += case.batch * positions(site[1]) * (3 * rows + inputs)
    return (8 * kept + 4 * batch) / 2**20


def stream_positions_of(case: Case) -> Callable[[str], int]:
    """Positions of the stream at a site: pixels of its group, tokens, or one."""
    if case.spec["family"] == "gpt":
        return lambda _: int(case.spec["context"])
    if case.spec["family"] == "resnet":
        side = case.spec["input_shape"][1]
        return lambda path: int((side // 2 ** int(path.split(".")[1])) ** 2)
    return lambda _: 1


def peak_mib(case: Case, mode: str) -> float:
    """Peak resident memory of a process that trains or probes."""
    command = [sys.executable, __file__, "--child", json.dumps([case._asdict(), mode])]
    given_back = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | given_back)
    return float(out.stdout.split()[-1])


def child(payload: str) -> None:
    """Run one mode and print the peak in MiB."""
    fields, mode = json.loads(payload)
    case = Case(**fields)
    tiny = mlp(8, 2, 64, 64)  # both modes load what the libraries load at their first use
    train(build(tiny.spec, seed=0), data(tiny))
    look(build(tiny.spec, seed=0), data(tiny), "copy")
    model, batches = build(case.spec, seed=0), data(case)
    if mode == "train":
        train(model, batches)
    else:
        train(model, batches[:1])
        look(model, batches, "copy")
    status = Path("/proc/self/status").read_text(encoding="ascii")  # getrusage would remember the parent's peak
    print(int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024)


def row(case: Case, *, pairs: int) -> str:
    """One line of the table."""
    model, batches = build(case.spec, seed=0), data(case)

    def plain() -> None:
        train(model, batches)

    plain_s, probe_s, copied = ratio(plain, lambda: look(model, batches, "copy"), pairs=pairs)
    random = ratio(plain, lambda: look(model, batches, "random"), pairs=pairs)[2]
    gather = gromo_statistics(case, batches)
    gromo = "-" if gather is None else f"{ratio(plain, gather, pairs=3)[2]:.2f}"
    above = peak_mib(case, "probe") - peak_mib(case, "train")
    return (
        f"| {case.name} | {case.samples} + {case.samples} | {plain_s:.2f} | {probe_s:.2f} | **{copied:.2f}** | "
        f"{random:.2f} | {gromo} | {above:.0f} ({allowed_mib(case):.0f}) |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child:
        child(arguments.child)
        return
    print("| network | n | plain, s | probe, s | probe / plain | with random blocks | GroMo / plain | "
          "memory above training, MiB (allowed) |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        smaller = case._replace(samples=case.samples // 4) if arguments.quick else case
        print(row(smaller, pairs=arguments.pairs), flush=True)


if __name__ == "__main__":
    main()
