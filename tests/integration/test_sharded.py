"""Growth of networks that several ranks share: sharded parameters, data-parallel wrappers, digests."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from growth_service.errors import UserError
from growth_service.growth import insert_block, remove_block, remove_units, widen, widen_stream
from growth_service.models import Family, build
from growth_service.training.ranks import Ranks, weights_digest
from tests.torch_helpers import generator, run_on_ranks

SPEC = {"family": "mlp", "input_shape": [1, 3, 3], "num_classes": 4, "widths": [6], "blocks": [2], "hidden": [8]}
BRANCH = "groups.0.blocks.1.branch"


def _wrapped(model: Family, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp" and not hasattr(model, "_sharded"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for block in model.groups[0].blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model._sharded = True  # type: ignore[assignment]
    return model


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    named = model.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named}


def _grow_on_two_ranks(rank: int, *, how: str, folder: str) -> None:
    """Train and grow on two ranks with half of the samples each, and beside that on one with all."""
    shared, alone = build(SPEC, seed=0), build(SPEC, seed=0)
    x = torch.randn(8, 1, 3, 3, generator=generator(7))
    mine = x[rank * 4 : rank * 4 + 4]
    wrapper = _wrapped(shared, how)
    pairs = [(shared, optim.AdamW(shared.parameters(), lr=1e-2)), (alone, optim.AdamW(alone.parameters(), lr=1e-2))]
    facts: dict[str, list[float]] = {}

    def train(steps: int) -> None:
        for _ in range(steps):
            for network, inputs, (_, optimizer) in ((wrapper, mine, pairs[0]), (alone, x, pairs[1])):
                optimizer.zero_grad()
                network(inputs).square().mean().backward()
                optimizer.step()

    def grow(name: str, step) -> None:
        nonlocal wrapper
        changes = [step(network, optimizer).output_change for network, optimizer in pairs]
        wrapper = _wrapped(shared, how)
        train(4)
        a, b = _full(shared), _full(alone)
        assert list(a) == list(b)
        facts[name] = [*changes, max(float((a[n] - b[n]).abs().max()) for n in b)]

    train(2)
    grow(
        "block",
        lambda m, o: insert_block(m, site="groups.0.blocks.0", optimizer=o, generator=generator(1), check_batch=x),
    )
    grow(
        "entry", lambda m, o: insert_block(m, site="groups.0.entry", optimizer=o, generator=generator(1), check_batch=x)
    )
    grow("units", lambda m, o: widen(m, site=BRANCH, units=4, optimizer=o, generator=generator(1), check_batch=x))
    if how == "ddp":
        grow(
            "stream",
            lambda m, o: widen_stream(
                m, site="groups.0.entry", channels=3, optimizer=o, generator=generator(1), check_batch=x
            ),
        )
        grow("shrink", lambda m, o: remove_units(m, site=BRANCH, units=[0], optimizer=o, check_batch=x))
        Ranks().agree(weights_digest(shared), what="at the end")
    else:
        for refuse in (
            lambda: widen_stream(shared, site="groups.0.entry", channels=3, generator=generator()),
            lambda: remove_units(shared, site=BRANCH, units=[0]),
        ):
            with pytest.raises(UserError, match="sharded by fully_shard"):
                refuse()
    grow("removal", lambda m, o: remove_block(m, block="groups.0.entry.grown.0", optimizer=o, check_batch=x))
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_ranks_grow_and_train_as_one_process_does(how, tmp_path):
    run_on_ranks(partial(_grow_on_two_ranks, how=how, folder=str(tmp_path)), world_size=2, tmp_path=tmp_path)
    for rank in range(2):
        facts = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert set(facts) >= {"block", "entry", "units", "removal"}
        for name in ("block", "entry", "units"):
            assert facts[name][:2] == [0.0, 0.0]
        assert all(difference < 2e-5 for *_, difference in facts.values()), facts
