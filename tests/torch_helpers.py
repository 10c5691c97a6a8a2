"""Small networks, data and trials for the tests that run torch, and processes that share a trial."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import get_context, start_processes

from growth_service.core.decisions import Decision
from growth_service.core.policies import FixedSteps, Policy, SignalGuided
from growth_service.core.schedule import GrowthSchedule, InitialSize
from growth_service.core.steps import AddBlock, AddChannels, AddData, AddUnits
from growth_service.models import Family, build
from growth_service.training.config import TrialConfig
from growth_service.training.datasets import prepare
from growth_service.training.ranks import Ranks, one_thread
from growth_service.training.stage_loop import run_trial

torch.set_num_threads(1)  # equal bits and fair times on shared cores

FAMILY_SPECS: dict[str, dict[str, Any]] = {
    "mlp": {"family": "mlp", "input_shape": [1, 3, 3], "num_classes": 4, "widths": [6], "blocks": [2], "hidden": [5]},
    "resnet": {
        "family": "resnet", "input_shape": [2, 6, 6], "num_classes": 4, "widths": [4, 8], "blocks": [1, 1],
        "hidden": [4, 4], "group_size": 2,
    },
}  # fmt: skip
"""Tiny networks of both families."""

FAMILY_SITES = {
    "mlp": ("groups.0.entry", "groups.0.blocks.0", "groups.0.blocks.1"),
    "resnet": ("groups.0.entry", "groups.0.blocks.0", "groups.1.entry", "groups.1.blocks.0"),
}
FAMILY_BLOCKS = {
    "mlp": ("groups.0.blocks.0.branch", "groups.0.blocks.1.branch"),
    "resnet": ("groups.0.blocks.0.branch", "groups.1.blocks.0.branch"),
}


def generator(seed: int = 0) -> torch.Generator:
    """A stream of its own: no test draws from the global one."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers of a seed."""
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def family(name: str, *, seed: int = 3, dtype: torch.dtype = torch.float32) -> Family:
    """A tiny network of a family."""
    return build(FAMILY_SPECS[name], seed=seed).to(dtype)


def family_data(
    name: str, *, num: int = 24, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Inputs and labels that fit it."""
    spec = FAMILY_SPECS[name]
    inputs = normal(num, *spec["input_shape"], seed=seed, dtype=dtype)
    return inputs, torch.randint(0, spec["num_classes"], (num,), generator=generator(seed + 1))


class SplitNet(nn.Module):
    """``top(stem(x))``, so that a test can start from the stream itself; the site is ``stem``."""

    stem: nn.Module

    def top(self, z: Tensor) -> Tensor:
        """Outputs from the stream."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Outputs from the inputs."""
        return self.top(self.stem(x))

    def _draw(self, seed: int) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(0.7 * normal(*parameter.shape, seed=seed + index))


class VectorNet(SplitNet):
    """Stream ``[B, 6]``; inputs ``[B, 5]``, 3 outputs."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)
        self._draw(seed)

    def top(self, z: Tensor) -> Tensor:
        """A curved head."""
        out: Tensor = self.head(z + torch.tanh(z))
        return out


class SequenceNet(SplitNet):
    """Stream ``[B, T, 4]``; inputs ``[B, T, 5]``, 3 outputs a token, each token reads those before it."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self._draw(seed)

    def top(self, z: Tensor) -> Tensor:
        """Mix over tokens, then a head for each."""
        out: Tensor = self.head(z + torch.tanh(self.mix(z)).cumsum(dim=1))
        return out


class ImageNet(SplitNet):
    """Stream ``[B, 4, H, W]``; inputs ``[B, 2, H, W]``, 3 outputs."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.mix = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)
        self._draw(seed)

    def top(self, z: Tensor) -> Tensor:
        """A convolution, then a head on the mean over positions."""
        out: Tensor = self.head((z + torch.tanh(self.mix(z))).square().mean(dim=(2, 3)))
        return out


class TupleNet(nn.Module):
    """``inner`` returns the stream and something else, as attention modules do."""

    class Inner(nn.Module):
        """Stream ``[B, 6]`` and a plain number."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, float]:
            """The stream first."""
            return self.linear(x), 2.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()
        self.head = nn.Linear(6, 3)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=index))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 5] -> [B, 3]``."""
        z, scale = self.inner(x)
        out: Tensor = self.head(z * scale)
        return out


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """All that something which only looks at a network must leave as it was, bit for bit."""
    python_stream, numpy_stream = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is meant
    return {
        "weights and buffers": {k: v.clone() for k, v in model.state_dict().items()},
        "gradients": {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()},
        "requires_grad": {k: p.requires_grad for k, p in model.named_parameters()},
        "modes": {k: m.training for k, m in model.named_modules()},
        "hooks": {k: [list(getattr(m, h)) for h in _HOOKS] for k, m in model.named_modules()},
        "attributes": {k: sorted(vars(m)) for k, m in model.named_modules()},
        "gradient mode": torch.is_grad_enabled(),
        "streams": [torch.get_rng_state(), python_stream, numpy_stream[1].tolist(), numpy_stream[2]],
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    """Compare with an earlier :func:`fingerprint`."""
    after = fingerprint(model)
    for name, wanted in before.items():
        assert same(after[name], wanted), f"{name} changed"


def same(a: Any, b: Any) -> bool:
    """Equal bits, through dictionaries and lists."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def prepared_digits(target: Path, *, limits: dict[str, int] | None = None) -> str:
    """The digits in a folder, few enough that a trial takes a second."""
    limits = limits or {"train": 320, "probe": 96, "val": 96, "test": 96}
    prepare("digits", seed=0, target=target, limits=limits)
    return str(target)


GROWS_ALL = FixedSteps(
    steps=(
        (0, (AddBlock(site="groups.1.entry", inner="copy", jumpboard=True),)),
        (
            1,
            (
                AddUnits(block="groups.1.blocks.0.branch", units=4),
                AddChannels(site="groups.1.entry", channels=4),
                AddBlock(site="groups.1.blocks.0"),
                AddData(share=1.0),
            ),
        ),
    )
)
"""Depth, width, the stream and data grow, with and without a jumpboard step."""
BY_SIGNAL = SignalGuided(units=4, tolerance_nats=0.05)
"""Certificates decide; on the small trial they find at least one useful block."""


def trial_config(
    folder: Path,
    *,
    data: str,
    policy: Policy = GROWS_ALL,
    data_share: float = 0.5,
    num_stages: int = 3,
    budget_flops: int = 2_000_000_000,
    seed: int = 0,
    base_seed: int = 5,
    probe: dict[str, Any] | None = None,
    **training: Any,
) -> TrialConfig:
    """A trial on the digits that takes about a second: 3 stages, about 30 batches of 32."""
    schedule = GrowthSchedule(
        name="small", initial=InitialSize(blocks=(1, 1), hidden=(8, 8), data_share=data_share), policy=policy,
        num_stages=num_stages,
    )  # fmt: skip
    spec = {
        "family": "resnet", "input_shape": [1, 8, 8], "num_classes": 10, "widths": [8, 16], "blocks": [1, 1],
        "hidden": [8, 8], "stem_stride": 1, "group_size": 4,
    }  # fmt: skip
    settings = {
        "optimizer": "adamw", "learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 32,
        "shards": 4, "warmup_share": 0.1, "floor_share": 0.02,
    }  # fmt: skip
    return TrialConfig(
        trial="small",
        schedule=schedule.to_dict(),
        base={"spec": spec, "seed": base_seed},
        training=settings | training,
        probe={"samples": 64, "train_samples": 64, "ridge": 1e-3} | (probe or {}),
        budget_flops=budget_flops,
        seed=seed,
        folder=str(folder),
        data=data,
    )


def run_to_end(config: TrialConfig, *, verdicts: Sequence[Decision | None] = ()) -> list[Any]:
    """All records of a trial on one process; ``verdicts`` are sent in after the first records."""
    loop = run_trial(config, ranks=Ranks())
    records = [next(loop)]
    for verdict in verdicts:
        records.append(loop.send(verdict))
    return [*records, *loop]


def comparable(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Records without what may differ between two runs of the same trial."""
    return [r.comparable() for r in records]


def run_on_ranks(fn: Callable[[int], None], *, world_size: int, tmp_path: Path) -> None:
    """Run ``fn(rank)`` in that many processes of one group; an exception in any of them comes out here.

    Rendezvous is by file, so no port is hunted. ``fn`` must be found by import: a function of a module,
    or a ``functools.partial`` of one. Processes are forked from a fresh server that has imported torch
    once and run nothing: clean as spawned ones, without six imports of four seconds each.
    """
    store = tmp_path / f"rendezvous-{world_size}"
    store.unlink(missing_ok=True)
    get_context("forkserver").set_forkserver_preload(["torch._dynamo", "growth_service.training.stage_loop"])
    start_processes(_on_rank, args=(fn, world_size, store.as_uri()), nprocs=world_size, start_method="forkserver")


def _on_rank(rank: int, fn: Callable[[int], None], world_size: int, store: str) -> None:
    one_thread()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        fn(rank)
    finally:
        dist.destroy_process_group()
