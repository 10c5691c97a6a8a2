"""Networks of other libraries: probed, grown at every site, trained on, saved, reloaded with the log."""

import pytest
import torch
from torch import nn, optim

from growth_service import load_network, probe, save_network
from growth_service.errors import CheckpointError
from growth_service.growth import growth_log, insert_block
from growth_service.models import default_block, sites
from tests.torch_helpers import generator

SEEDS = range(5)
TOKENS, CONTEXT = 23, 16


def gpt2(seed):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def neox(seed):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=TOKENS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=CONTEXT, use_cache=False,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


def resnet(seed):
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    return resnet18(num_classes=4)


class Task:
    """Data that a network can learn something of, and how it is trained on it."""

    def __init__(self, make, seed):
        self.images, draws = make is resnet, generator(100 + seed)
        if self.images:
            prototypes = torch.randn(4, 3, 16, 16, generator=draws)
            self.targets = torch.arange(16) % 4
            self.inputs = prototypes[self.targets] + 1.5 * torch.randn(16, 3, 16, 16, generator=draws)
        else:  # a noisy cycle through the tokens
            start = torch.randint(0, TOKENS, (64, 1), generator=draws)
            clean = (start + torch.arange(CONTEXT + 1)) % TOKENS
            noise = torch.randint(0, TOKENS, clean.shape, generator=draws)
            tokens = torch.where(torch.rand(clean.shape, generator=draws) < 0.1, noise, clean)
            self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]

    def loss(self, outputs, targets):
        logits = getattr(outputs, "logits", outputs)
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))

    def batches(self, part):
        return [(self.inputs[part], self.targets[part])]

    @torch.no_grad()
    def outputs(self, model):
        model.eval()
        found = model(self.inputs)
        return getattr(found, "logits", found)

    def value(self, model):
        return float(self.loss(self.outputs(model), self.targets))

    def train(self, model, optimizer, steps):
        model.train()
        half = len(self.inputs) // 2
        for step in range(steps):
            part = slice(half * (step % 2), half * (step % 2 + 1))
            optimizer.zero_grad()
            self.loss(model(self.inputs[part]), self.targets[part]).backward()
            optimizer.step()


@pytest.mark.parametrize(("make", "before"), [(gpt2, 60), (neox, 60), (resnet, 20)])
def test_foreign_networks_are_probed_grown_at_every_site_trained_saved_and_reloaded(make, before, tmp_path):
    """In four of five seeds at least, 50 steps after growth the loss is no higher than before."""
    better = 0
    for seed in SEEDS:
        task, model = Task(make, seed), make(seed)
        if make is resnet:
            optimizer = optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)
        else:
            optimizer = optim.AdamW(model.parameters(), lr=3e-3)
        task.train(model, optimizer, before)
        loss, outputs = task.value(model), task.outputs(model)

        if seed == 0:
            half = len(task.inputs) // 2
            report = probe(
                model.eval(), batches=task.batches(slice(0, half)), train_batches=task.batches(slice(half, None)),
                loss=task.loss, reduction="mean",
            )  # fmt: skip
            assert {s.site for s in report.sites} == {s.path for s in sites(model)}
        for site in sites(model):
            block, _ = default_block(model, site, generator=generator(seed), copy=True)
            insert_block(model, site=site.path, block=block, generator=generator(), optimizer=optimizer)
        assert torch.equal(task.outputs(model), outputs)
        assert task.value(model) == loss

        task.train(model, optimizer, 50)
        better += task.value(model) <= loss
        save_network(model, tmp_path / str(seed))
        again = load_network(tmp_path / str(seed), base=make(seed + 50))
        assert growth_log(again) == growth_log(model)
        assert torch.equal(task.outputs(again), task.outputs(model))
    assert better >= 4


def test_a_base_of_ones_own_must_be_given_and_must_fit(tmp_path):
    model = gpt2(0)
    insert_block(
        model, site="transformer.h.0", generator=generator(), check_batch={"input_ids": torch.zeros(1, 3).long()}
    )
    save_network(model, tmp_path)
    with pytest.raises(CheckpointError, match="pass it as base="):
        load_network(tmp_path)
    with pytest.raises(CheckpointError, match="growth log in .* does not fit this base"):
        load_network(tmp_path, base=nn.Sequential(nn.Linear(2, 2)))
    other = gpt2(0).to(torch.float64)
    with pytest.raises(CheckpointError, match=r"another precision: .*call base\.to\(torch\.float32\)"):
        load_network(tmp_path, base=other)
    assert growth_log(other) == []
