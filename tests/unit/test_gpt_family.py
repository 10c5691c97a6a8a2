"""The family of causal transformers: tokens in, logits out, and the same growth as the others."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch_helpers import generator, normal

from growth_service.blocks import TransformerBlock
from growth_service.errors import UserError
from growth_service.growth import growth_log, insert_block, rebuild
from growth_service.models import FAMILIES, build, default_block, default_block_config, sites
from growth_service.models.flops import block_flops_per_sample, counted, flops_per_sample
from growth_service.models.sites import blocks_of, nearest, reader, size_of

VOCAB, CONTEXT, WIDTH, HIDDEN, HEADS = 11, 9, 8, 12, 2
SPEC = {
    "family": "gpt", "vocab": VOCAB, "context": CONTEXT, "widths": [WIDTH], "blocks": [2], "hidden": [HIDDEN],
    "heads": HEADS,
}  # fmt: skip
VARIANTS = [{}, {"positions": "rotary"}, {"parallel": True}, {"norm": "rms", "positions": "rotary", "parallel": True}]
PATHS = ["groups.0.entry", "groups.0.blocks.0", "groups.0.blocks.1"]


def network(*, seed=0, **changes):
    return build(SPEC | changes, seed=seed)


def tokens(num=3, length=CONTEXT, seed=0):
    return torch.randint(0, VOCAB, (num, length), generator=generator(seed))


# --- the network ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", VARIANTS)
def test_logits_are_one_row_a_token(changes):
    logits = network(**changes)(tokens())
    assert logits.shape == (3, CONTEXT, VOCAB)
    assert logits.isfinite().all()


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_token_changes_no_logit_before_it(changes):
    model, before = network(**changes), tokens()
    after = before.clone()
    after[:, 5] = (after[:, 5] + 1) % VOCAB
    with torch.no_grad():
        moved = (model(after) - model(before)).abs().amax(dim=(0, 2))
    assert not moved[:5].any()
    assert (moved[5:] > 0).all()


@pytest.mark.parametrize("changes", [{}, {"positions": "rotary"}])
def test_the_order_of_earlier_tokens_matters(changes):
    model, before = network(**changes), tokens()
    after = before.clone()
    after[:, [0, 1]] = torch.tensor([1, 2])
    before[:, [0, 1]] = torch.tensor([2, 1])
    with torch.no_grad():
        assert (model(after)[:, -1] - model(before)[:, -1]).abs().max() > 1e-4


def test_rotary_positions_have_no_longest_sequence():
    assert network(positions="rotary")(tokens(length=3 * CONTEXT)).shape[1] == 3 * CONTEXT


def test_learned_positions_refuse_a_sequence_beyond_the_context():
    with pytest.raises(UserError, match=r"a sequence of 10 tokens is longer than the context of this network \(9\)"):
        network()(tokens(length=CONTEXT + 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "alibi"}, "positions 'learned' or 'rotary' and norm 'layer' or 'rms', got 'alibi'"),
        ({"norm": "batch"}, "got 'learned' and 'batch'"),
        ({"positions": "rotary", "widths": [6]}, "must be a multiple of twice its 2 heads"),
        ({"widths": [9]}, "width 9 of a transformer block must be a multiple of its 2 heads"),
        ({"blocks": [1, 1]}, r"has 1 group\(s\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        network(**changes)


def test_a_missing_size_is_named():
    with pytest.raises(UserError, match="family 'gpt' lacks 'heads'"):
        build({k: v for k, v in SPEC.items() if k != "heads"}, seed=0)


def test_what_the_specification_says_of_blocks_reaches_them():
    changes = {"parallel": True, "norm": "rms", "positions": "rotary", "heads": 4, "hidden": [20]}
    config = next(iter(blocks_of(network(**changes)).values())).config()
    wanted = {"parallel": True, "norm": "rms", "rotary": 1.0, "heads": 4, "hidden": 20, "causal": True, "width": WIDTH}
    assert wanted.items() <= config.items()


def test_weights_are_those_of_the_seed_whatever_the_global_stream():
    torch.manual_seed(1)
    first = network(seed=5)
    torch.manual_seed(2)
    again, other = network(seed=5), network(seed=6)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert all(not torch.equal(a, c) for a, _, c in pairs if a.ndim > 1)


def test_deeper_networks_have_smaller_projections_and_embeddings_are_those_of_gpt2():
    one, four = network(blocks=[1], widths=[64], hidden=[64]), network(blocks=[4], widths=[64], hidden=[64])
    shallow, deep = (next(iter(blocks_of(m).values())).project.weight.detach().std() for m in (one, four))
    assert float(shallow / deep) == pytest.approx(2.0, rel=0.05)
    assert float(four.groups[0].entry.positions.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_it_learns_to_repeat_a_token_it_has_seen():
    """Targets repeat the token before: one block can look one place back."""
    model = network(seed=1, widths=[16], hidden=[32])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        seen = tokens(num=32, seed=step)
        loss = nn.functional.cross_entropy(model(seen)[:, 1:].flatten(0, 1), seen[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 < 2.0 < losses[0]


# --- growth ---------------------------------------------------------------------------------------------


def test_its_sites_are_the_embedding_and_the_blocks():
    found = sites(network())
    assert [(s.path, s.kind, s.width, s.preserving) for s in found] == [(p, "sequence", WIDTH, True) for p in PATHS]


def test_its_sites_have_readers_and_blocks_like_its_own():
    model = network(positions="rotary")
    entry, first, last = sites(model)
    assert [reader(model, s) for s in (entry, first, last)] == [
        "groups.0.blocks.0.branch", "groups.0.blocks.1.branch", None
    ]  # fmt: skip
    assert nearest(model, last) == "groups.0.blocks.1.branch"
    for site in (entry, first, last):
        block, source = default_block(model, site, generator=generator(), copy=True)
        assert isinstance(block, TransformerBlock)
        own = blocks_of(model)[source]
        assert block.config() == own.config() == default_block_config(model, site)
        assert torch.equal(block.query.weight, own.query.weight)
        assert block.is_zero


def test_a_network_without_blocks_still_knows_what_a_block_of_its_own_is():
    model = network(blocks=[0], parallel=True)
    block, source = default_block(model, sites(model)[0], generator=generator(), copy=True)
    assert source is None
    assert block.config() == next(iter(blocks_of(network(parallel=True)).values())).config()


@pytest.mark.parametrize("changes", VARIANTS)
def test_insertion_everywhere_changes_no_bit_and_can_be_replayed(changes):
    model, seen = network(**changes), tokens()
    before = model(seen)
    for site in sites(model):
        assert insert_block(model, site=site.path, generator=generator(), check_batch=seen).output_change == 0.0
    assert torch.equal(model(seen), before)
    assert size_of(model)[:2] == (5, 5 * HIDDEN)
    twin = rebuild(network(**changes), growth_log(model))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(seen), before)


def test_its_size_is_its_blocks_their_hidden_units_and_its_parameters():
    block = 4 * WIDTH + 3 * (WIDTH * WIDTH + WIDTH) + (WIDTH * HIDDEN + HIDDEN) + (WIDTH + HIDDEN) * WIDTH + WIDTH
    ends = VOCAB * WIDTH + CONTEXT * WIDTH + 2 * WIDTH + VOCAB * WIDTH
    assert size_of(network()) == (2, 2 * HIDDEN, 2 * block + ends)


# --- compute --------------------------------------------------------------------------------------------


def attention(*, kernel, heads=3, length=7, head_dim=4, value_dim=4, batch=2):
    """(forward, forward and backward) FLOPs of attention alone, by our counter."""
    made = [
        normal(batch, heads, length, d, seed=i).requires_grad_() for i, d in enumerate((head_dim, head_dim, value_dim))
    ]

    def run():
        with nn.attention.sdpa_kernel(kernel):
            return nn.functional.scaled_dot_product_attention(*made, is_causal=True)

    return counted(run), counted(lambda: run().sum().backward())


def test_fused_attention_costs_the_products_that_plain_attention_spells_out():
    """The fused backward pass computes the scores once more, since it does not keep them."""
    scores = 2 * 2 * 3 * 7 * 7 * 4
    plain, plain_both = attention(kernel=nn.attention.SDPBackend.MATH)
    fused, fused_both = attention(kernel=nn.attention.SDPBackend.FLASH_ATTENTION)
    assert fused == plain == 2 * scores
    assert plain_both == 6 * scores
    assert fused_both == plain_both + scores


def test_attention_costs_on_the_cpu_what_torch_says_it_costs_elsewhere():
    q, k, v = (normal(2, 4, 7, d) for d in (6, 6, 6))
    forward = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    backward = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention_backward]
    out = forward(q, k, v), forward(q, k, v) + backward(q, q, k, v)
    assert attention(kernel=nn.attention.SDPBackend.FLASH_ATTENTION, heads=4, head_dim=6, value_dim=6) == out


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_network_costs_what_its_matrices_and_its_attention_cost(changes):
    model, (t, d, h) = network(**changes), (CONTEXT, WIDTH, HIDDEN)
    pairs = 4 * t * t * d  # scores, and values by scores
    block = 2 * t * d * (3 * d + h + (d + h))
    cost = flops_per_sample(model, tokens(1))
    assert cost.forward == 2 * (block + pairs) + 2 * t * d * VOCAB
    assert cost.backward == 2 * (2 * block + 2 * pairs + pairs // 2) + 2 * 2 * t * d * VOCAB


def test_a_batch_costs_its_samples_times_the_cost_of_one():
    model = network()
    assert counted(lambda: model(tokens(5)).sum().backward()) == 5 * flops_per_sample(model, tokens(1)).train


@pytest.mark.parametrize("changes", VARIANTS)
def test_an_inserted_block_adds_what_it_says(changes):
    model = network(**changes)
    block, _ = default_block(model, sites(model)[1], generator=generator(), copy=False)
    added = block_flops_per_sample(block, normal(1, CONTEXT, WIDTH))
    before = flops_per_sample(model, tokens(1)).train
    insert_block(model, site=PATHS[1], block=block, generator=generator())
    assert flops_per_sample(model, tokens(1)).train - before == added


def test_multihead_attention_costs_the_same_in_evaluation_and_training():
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = normal(3, 5, 8)

    def run():
        return module(x, x, x, need_weights=False)[0]

    def fast():
        with torch.no_grad():
            return run()

    assert counted(fast) == counted(run) == 3 * (4 * 2 * 5 * 8 * 8 + 2 * 2 * 5 * 5 * 8)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_grouped_convolution_costs_twice_as_much_backward_as_forward(groups):
    conv, x = nn.Conv2d(8, 8, 3, padding=1, groups=groups), normal(2, 8, 5, 5).requires_grad_()
    forward = counted(lambda: conv(x))
    assert forward == 2 * 2 * 25 * 8 * (8 // groups) * 9
    assert counted(lambda: conv(x).sum().backward()) == 3 * forward


def test_the_counter_counts_what_torch_counts_where_torch_knows_all_operations():
    model, seen = network(positions="rotary"), tokens()
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as wanted:
        model(seen).sum().backward()
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        assert counted(lambda: model(seen).sum().backward()) == wanted.get_total_flops()


def test_the_family_is_known_by_name():
    assert FAMILIES["gpt"] is type(network())
