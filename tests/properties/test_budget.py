"""The account balances after any sequence of promises and payments, refused ones included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from growth_service.core.budget import Budget
from growth_service.errors import UserError

FLOPS = st.integers(0, 10**18)


class Account(RuleBasedStateMachine):
    """Stages reserve and settle in any order; a plain list of promises is the model."""

    promises = Bundle("promises")

    @initialize(total=FLOPS)
    def open_it(self, total):
        self.total, self.spent, self.open = total, 0, []
        self.budget = Budget(total_flops=total)

    @rule(target=promises, data=st.data())
    def reserve(self, data):
        flops = data.draw(st.integers(0, self.total - self.spent - sum(self.open)))
        self.budget = self.budget.reserve(flops)
        self.open.append(flops)
        return flops

    @rule(promise=consumes(promises), data=st.data())
    def settle(self, promise, data):
        spent = data.draw(st.integers(0, promise))
        self.budget = self.budget.settle(reserved=promise, spent=spent)
        self.open.remove(promise)
        self.spent += spent

    @rule(excess=st.integers(1, 10**6))
    def reserve_more_than_is_free(self, excess):
        before = self.budget
        with pytest.raises(UserError, match=r"cannot reserve \d+ FLOPs: \d+ of \d+ are free; raise the budget"):
            before.reserve(before.free_flops + excess)

    @rule(target=promises, promise=consumes(promises), excess=st.integers(1, 10**6))
    def spend_more_than_was_promised(self, promise, excess):
        with pytest.raises(ValueError, match=f"cannot settle {promise + excess} of {promise} FLOPs"):
            self.budget.settle(reserved=promise, spent=promise + excess)
        return promise

    @rule(excess=st.integers(1, 10**6))
    def settle_more_than_is_reserved(self, excess):
        with pytest.raises(ValueError, match=r"cannot settle 0 of \d+ FLOPs with \d+ reserved"):
            self.budget.settle(reserved=self.budget.reserved_flops + excess, spent=0)

    @rule(target=promises)
    def nothing_happens(self):
        return multiple()

    @invariant()
    def the_account_balances(self):
        b = self.budget
        assert b.spent_flops + b.reserved_flops + b.free_flops == b.total_flops == self.total

    @invariant()
    def nothing_is_below_zero(self):
        assert min(self.budget.to_dict().values()) >= 0

    @invariant()
    def the_figures_are_those_of_the_model(self):
        assert self.budget == Budget(total_flops=self.total, spent_flops=self.spent, reserved_flops=sum(self.open))


TestAccount = Account.TestCase


@given(FLOPS, st.data())
def test_what_is_reserved_and_not_spent_is_free_again(total, data):
    promise = data.draw(st.integers(0, total))
    spent = data.draw(st.integers(0, promise))
    assert Budget(total_flops=total).reserve(promise).settle(reserved=promise, spent=spent).free_flops == total - spent


def test_an_operation_leaves_the_old_account_as_it_was():
    before = Budget(total_flops=10)
    before.reserve(4)
    assert before == Budget(total_flops=10, spent_flops=0, reserved_flops=0)


def test_all_of_a_budget_can_be_reserved_and_then_nothing():
    full = Budget(total_flops=10).reserve(10)
    assert full.reserve(0) == full
    with pytest.raises(UserError, match="cannot reserve 1 FLOPs: 0 of 10 are free"):
        full.reserve(1)


def test_a_negative_promise_is_refused():
    with pytest.raises(ValueError, match="cannot reserve -1 FLOPs"):
        Budget(total_flops=10).reserve(-1)


def test_a_negative_payment_is_refused():
    with pytest.raises(ValueError, match="cannot settle -1 of 5 FLOPs with 5 reserved"):
        Budget(total_flops=10).reserve(5).settle(reserved=5, spent=-1)


@pytest.mark.parametrize(
    "figures",
    [
        {"total_flops": -1},
        {"total_flops": 10, "spent_flops": -1},
        {"total_flops": 10, "reserved_flops": -1},
        {"total_flops": 10, "spent_flops": 6, "reserved_flops": 5},
    ],
)
def test_an_account_out_of_balance_cannot_be_made(figures):
    with pytest.raises(ValueError, match="budget out of balance"):
        Budget(**figures)


def test_the_dict_of_an_account_has_its_four_figures():
    account = Budget(total_flops=10, spent_flops=3, reserved_flops=5)
    assert account.to_dict() == {"total_flops": 10, "spent_flops": 3, "reserved_flops": 5, "free_flops": 2}
