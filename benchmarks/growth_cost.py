"""What a growth step costs, in training steps of the same network.

    python benchmarks/growth_cost.py            the table (about 2 minutes)

A growth step is the change itself, the optimiser's adoption, and the renewal of the data-parallel wrapper, with the
digests of all ranks compared where there are several (gloo, one process and thread each, on this machine). A
training step is forward, backward and AdamW on one batch; each rank has half of it where there are two. Medians,
in one process; the network is put back after each growth step.
"""

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from growth_service.growth import insert_block, remove_block, widen, widen_stream
from growth_service.models import Family, build, default_block, sites
from growth_service.training.ranks import Ranks, weights_digest

REPEATS = 7


class Case(NamedTuple):
    """A network and a batch."""

    name: str
    spec: dict[str, Any]
    batch: int
    channels: int


CASES = (
    Case(
        "residual CNN, widths 16/32/64, 32x32 images, batch 128",
        {
            "family": "resnet", "input_shape": [3, 32, 32], "num_classes": 10, "widths": [16, 32, 64],
            "blocks": [3, 3, 3], "hidden": [16, 32, 64], "group_size": 4,
        },
        128,
        16,
    ),
    Case(
        "GPT, 4 layers, width 128, context 64, batch 32",
        {
            "family": "gpt", "vocab": 96, "context": 64, "widths": [128], "blocks": [4], "hidden": [512], "heads": 4,
            "positions": "learned",
        },
        32,
        32,
    ),
)  # fmt: skip


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """One batch of random inputs and labels."""
    generator = torch.Generator().manual_seed(0)
    if case.spec["family"] == "gpt":
        tokens = torch.randint(0, case.spec["vocab"], (case.batch, case.spec["context"] + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    inputs = torch.randn(case.batch, *case.spec["input_shape"], generator=generator)
    return inputs, torch.randint(0, case.spec["num_classes"], (case.batch,), generator=generator)


def train_step(model: nn.Module, optimizer: optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """Forward, backward, update."""
    inputs, targets = batch
    optimizer.zero_grad(set_to_none=True)
    out = model(inputs)
    nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), targets.reshape(-1)).backward()
    optimizer.step()


Step = Callable[[Family, optim.Optimizer], None]


def _insert(model: Family, optimizer: optim.Optimizer) -> None:
    site = sites(model)[len(sites(model)) // 2]
    block, _ = default_block(model, site, generator=torch.Generator().manual_seed(1), copy=True)
    insert_block(model, site=site.path, block=block, generator=torch.Generator(), optimizer=optimizer)


def _units(model: Family, optimizer: optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    widen(model, site="groups.0.blocks.1.branch", units=16, generator=generator, optimizer=optimizer)


def _channels(model: Family, optimizer: optim.Optimizer, *, num: int) -> None:
    generator = torch.Generator().manual_seed(1)
    widen_stream(model, site="groups.0.entry", channels=num, generator=generator, optimizer=optimizer)


def _remove(model: Family, optimizer: optim.Optimizer) -> None:
    remove_block(model, block="groups.0.blocks.1.branch", optimizer=optimizer)


def measure(case: Case, *, ranks: int) -> dict[str, float]:
    """Median seconds of a training step and of each growth step, on this rank."""
    known = Ranks()
    inputs, targets = batch_of(case)
    half = slice(known.rank * case.batch // ranks, (known.rank + 1) * case.batch // ranks)
    model = build(case.spec, seed=0)

    def wrapped(network: nn.Module) -> nn.Module:
        return DistributedDataParallel(network) if ranks > 1 else network

    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    parallel = wrapped(model)
    found: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], Any]) -> None:
        known.barrier()
        start = time.perf_counter()
        action()
        found.setdefault(name, []).append(time.perf_counter() - start)

    steps: dict[str, Step] = {
        "insert a block": _insert,
        "16 units": _units,
        f"{case.channels} channels": partial(_channels, num=case.channels),
        "remove a block": _remove,
    }
    train_step(parallel, optimizer, (inputs[half], targets[half]))
    for _ in range(REPEATS):
        timed("training step", lambda: train_step(parallel, optimizer, (inputs[half], targets[half])))
        for name, step in steps.items():
            fresh = copy.deepcopy(model)
            pairs = list(zip(model.parameters(), fresh.parameters(), strict=True))
            adopted = optim.AdamW(fresh.parameters(), lr=1e-3)
            adopted.state.update({new: copy.deepcopy(optimizer.state[old]) for old, new in pairs})

            def grow(step: Step = step, fresh: Family = fresh, adopted: optim.Optimizer = adopted) -> None:
                step(fresh, adopted)
                if ranks > 1:
                    known.agree(weights_digest(fresh), what="after growing")
                wrapped(fresh)

            timed(name, grow)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _on_rank(rank: int, case: Case, ranks: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    seconds = measure(case, ranks=ranks)
    if rank == 0:
        Path(out).write_text("\n".join(f"{name}\t{value}" for name, value in seconds.items()))
    dist.destroy_process_group()


def on_two_ranks(case: Case) -> dict[str, float]:
    """The same on two processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds"
        store = (Path(folder) / "store").as_uri()
        start_processes(_on_rank, args=(case, 2, store, str(out)), nprocs=2, start_method="spawn")
        rows = [line.split("\t") for line in out.read_text().splitlines()]
        return {name: float(value) for name, value in rows}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| network | ranks | training step, ms | growth step | ms | / training step |\n|---|---|---|---|---|---|")
    for case in CASES:
        for ranks in (1, 2):
            seconds = measure(case, ranks=1) if ranks == 1 else on_two_ranks(case)
            plain = seconds.pop("training step")
            for name, value in seconds.items():
                print(
                    f"| {case.name} | {ranks} | {1e3 * plain:.0f} | {name} | {1e3 * value:.1f} | {value / plain:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
