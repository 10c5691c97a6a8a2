r"""What a grow step promises for the test loss, what it did, and which promises are empty.

Two networks stand between the old one and the new one: the population jumpboard
:math:`\tilde f_{pop}`, a step along a direction from an independent fold, and the training jumpboard
:math:`\tilde f_S`, a step along the direction of the training sample S (size M). With losses in [0, B],
a test sample of size K and :math:`\epsilon` the largest deviation of a sample mean over the networks in reach,

.. math::
    \Delta_R = L(f) - L(\tilde f_{pop}),\quad \Delta_R^{test} = L_{test}(f) - L_{test}(\tilde f_S),\quad
    \Delta_{ERM} = L_S(\tilde f) - L_S(f')

.. math::
    (A)\quad L_{test}(f') \le L_{test}(f) - \Delta_R/2 - \Delta_{ERM} + 2\epsilon_M,\qquad
    (B)\quad L_{test}(f') \le L_{test}(f) - \Delta_R^{test} - \Delta_{ERM} + 2(\epsilon_M + \epsilon_K).

Route A's training gain starts from :math:`\tilde f_{pop}`, route B's from :math:`\tilde f_S`. Source: the two
routes of Cheng et al. 2026 (arXiv:2605.08297), reconstructed from Hoeffding's inequality and uniform
deviations. Uniform deviations of real blocks are large: expect both routes to be vacuous and decide by
:func:`growth_service.core.confidence.accept_growth`.

Shape legend: M = training samples, K = test samples, N = either.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from growth_service.core.confidence import empirical_bernstein_upper
from growth_service.core.ledger import Ledger
from growth_service.core.score import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkLosses:
    """Losses of one network, one a sample, in nats; samples in the same order for all networks."""

    train_M: FloatArray
    test_K: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockClass:
    """The networks in reach: everything frozen but the output projection W of the inserted block."""

    lipschitz: float
    """Lz: how fast the loss can change with the stream in reach; the largest activation-gradient norm there."""
    weight_norm: float
    """b: largest ||W Sigma^(1/2)||_F in reach, the root mean square of what the block adds."""
    width: int
    """d, of the stream."""
    features: int
    """k, with the constant one."""


def rademacher_bound(block: BlockClass, *, num_samples: int) -> float:
    r"""How well the block can fit random signs: :math:`\sqrt 2\,L_z\,b\,\sqrt{dk/N}`.

    Source: the vector contraction inequality of Maurer 2016, "A vector-contraction inequality for Rademacher
    complexities" (arXiv:1605.00251), for a linear map in the whitened norm, where tr Sigma becomes k.

    Args:
        block: The networks in reach.
        num_samples: N >= 1.

    Returns:
        Nats, >= 0; 0.0 where nothing may move.
    """
    per_sample = block.width * block.features / num_samples
    return math.sqrt(2) * block.lipschitz * block.weight_norm * math.sqrt(per_sample)


def deviation_bound(block: BlockClass, *, num_samples: int, bound: float, delta: float) -> float:
    r"""eps: largest distance of sample mean and expectation of the loss over the networks in reach.

    .. math:: \epsilon_N = 2 R_N + B\sqrt{\ln(2/\delta)/(2N)}

    Source: symmetrisation and the bounded-difference inequality, for example Bartlett and Mendelson 2002,
    "Rademacher and Gaussian Complexities" (JMLR 3).

    Args:
        block: The networks in reach.
        num_samples: N >= 1.
        bound: B, the loss is in [0, B], nats.
        delta: Probability that the distance is larger, in (0, 1).

    Returns:
        Nats, >= 0.
    """
    return 2 * rademacher_bound(block, num_samples=num_samples) + bound * math.sqrt(
        math.log(2 / delta) / (2 * num_samples)
    )


def fallback(loss_train_after: float, loss_train_jumpboard: float) -> bool:
    """Must training be undone? True where it ended above the jumpboard, or not at a number at all.

    Source: condition 2 of Cheng et al. 2026 (arXiv:2605.08297). Both losses on the whole training sample in
    force, in eval mode, never on the test sample. Equal losses keep what training did.
    """
    return not loss_train_after <= loss_train_jumpboard


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One promise for the test loss of the new network."""

    name: Literal["A", "B"]
    bound: float
    """Largest test loss of the new network that it allows, nats."""
    probability: float
    """With which it holds, at least; at or below 0 it says nothing."""
    unmet: str | None
    """The precondition that fails, in words; None: the route applies."""
    is_vacuous: bool
    """True where it promises no decrease, or with no probability."""

    @property
    def applies(self) -> bool:
        """Its preconditions are met; it may still be vacuous."""
        return self.unmet is None

    def describe(self, *, old_test: float) -> str:
        """The promise in one line."""
        if self.unmet is not None:
            return f"route {self.name} does not apply: {self.unmet}"
        promise = f"test loss <= {self.bound:.4g} (old network {old_test:.4g}) with probability {self.probability:.3g}"
        return f"route {self.name} {'is vacuous' if self.is_vacuous else 'holds'}: {promise}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TestRiskReport:
    """The test-risk account of one grow step. All losses truncated at ``bound`` and in nats."""

    __test__ = False  # a result, not a test

    num_train: int
    num_test: int
    bound: float
    delta: float
    num_truncated: int
    """Losses above the bound over all networks and both samples."""
    old_test: float
    new_test: float
    delta_r: float
    """Population margin of the independent direction, estimated on the test sample."""
    delta_r_lower: float
    """Its empirical-Bernstein lower limit at ``delta``; what route A may use."""
    delta_r_test: float
    """Margin of the training direction on the test sample."""
    delta_erm: float
    """What training gained on S from the training jumpboard on (route B, and the identity)."""
    delta_erm_pop: float
    """The same from the population jumpboard on (route A)."""
    gamma: float
    """Growth of the gap between test and training loss, from the training jumpboard on."""
    identity_residual: float
    """Left side less right side of ``old_test - new_test = delta_r_test + delta_erm - gamma``: rounding only."""
    eps_m: float
    eps_k: float
    """Uniform deviations on the training and on the test sample, for the inserted block only."""
    route_a: Route
    route_b: Route
    normalisation_margin: float | None
    """Smallest rms of the stream in units of sqrt(eps) of its norm; None: not measured. Far above 1: the
    norm is non-degenerate; near or below 1 its Lipschitz constant is that of eps, not of the data."""

    @property
    def realised_change(self) -> float:
        """Change of the test loss, new less old; below zero is better."""
        return self.new_test - self.old_test

    @property
    def route(self) -> Route | None:
        """The better of the routes that apply: one that says something first, then the lower bound."""
        applicable = [r for r in (self.route_a, self.route_b) if r.applies]
        return min(applicable, key=lambda r: (r.is_vacuous, r.bound)) if applicable else None

    @property
    def is_vacuous(self) -> bool:
        """True where no route applies that promises a decrease."""
        return self.route is None or self.route.is_vacuous

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with what follows from the fields; an infinite margin becomes null."""
        chosen = self.route.name if self.route is not None else None
        margin = self.normalisation_margin
        return asdict(self) | {
            "normalisation_margin": margin if margin is not None and math.isfinite(margin) else None,
            "realised_change": self.realised_change,
            "route": chosen,
            "is_vacuous": self.is_vacuous,
        }

    def summary(self) -> str:
        """A few lines of plain text: what holds, what is vacuous, what happened."""
        used = "no route applies" if self.route is None else f"route {self.route.name} is the better one"
        verdict = "it promises nothing" if self.is_vacuous else "it promises a decrease"
        margin = (
            "not measured"
            if self.normalisation_margin is None
            else f"smallest rms of the stream is {self.normalisation_margin:.3g} times sqrt(eps)"
        )
        return "\n".join(
            [
                f"margin: {self.delta_r:+.4g} nats in the population (at least {self.delta_r_lower:+.4g}), "
                f"{self.delta_r_test:+.4g} along the training direction on {self.num_test} test samples",
                f"training: {self.delta_erm:+.4g} nats from the training jumpboard on, "
                f"{self.delta_erm_pop:+.4g} from the population jumpboard on",
                f"uniform deviation, inserted block only and all else frozen: {self.eps_m:.4g} nats on "
                f"{self.num_train} training samples, {self.eps_k:.4g} on the test samples",
                self.route_a.describe(old_test=self.old_test),
                self.route_b.describe(old_test=self.old_test),
                used if self.route is None else f"{used}: {verdict}",
                f"realised: test loss {self.old_test:.4g} -> {self.new_test:.4g} ({self.realised_change:+.4g}) = "
                f"-({self.delta_r_test:+.4g} {self.delta_erm:+.4g} {-self.gamma:+.4g}), residual "
                f"{self.identity_residual:.1g}",
                f"normalisation: {margin}",
            ]
        )


def test_risk(
    *,
    old: NetworkLosses,
    jumpboard_pop: NetworkLosses,
    jumpboard_train: NetworkLosses,
    new: NetworkLosses,
    bound: float,
    delta: float,
    block: BlockClass,
    smallest_rms: float | None,
    norm_eps: float | None,
) -> TestRiskReport:
    r"""Account for one grow step on a test sample that nothing was fitted to.

    Route A needs the population margin, which is not known: its lower limit at ``delta`` takes its
    place, and so route A holds with probability :math:`1 - 2\delta - e^{-K\Delta^2/(8B^2)}` (one delta for
    eps_M, one for the limit), the exponential by Hoeffding's inequality for differences in [-B, B]. Route B
    holds with :math:`1 - 2\delta`, one delta for each of its deviations. A route applies where training did
    not end above its jumpboard, route A where besides its margin is certainly positive.

    Args:
        old: Losses of the network before the step.
        jumpboard_pop: Of the step along the direction of an independent fold (neither S nor test).
        jumpboard_train: Of the step along the training direction.
        new: Of the network after training (or of the jumpboard where training was undone).
        bound: B in nats, > 0; losses above are truncated, infinite ones too.
        delta: Error level of each ingredient, in (0, 1).
        block: The networks in reach. The routes are theorems only where all else stayed frozen and
            W stayed within ``block.weight_norm``.
        smallest_rms: Smallest root mean square of the stream at any norm on either sample; None: not measured.
        norm_eps: eps of that norm; None: not known.

    Returns:
        The account. The routes may be vacuous (they mostly are); the identity is exact.

    Raises:
        ValueError: If losses are not paired, too few, negative or not numbers, or bound or delta are
            outside their range.
    """
    if not bound > 0:
        raise ValueError(f"bound {bound} must be above 0 nats")
    if not 0 < delta < 1:
        raise ValueError(f"delta {delta} must be in (0, 1)")
    nets = {"old": old, "jumpboard_pop": jumpboard_pop, "jumpboard_train": jumpboard_train, "new": new}
    _check_losses(nets)
    num_train, num_test = old.train_M.shape[0], old.test_K.shape[0]
    train = {name: _mean(net.train_M, bound=bound) for name, net in nets.items()}
    test = {name: _mean(net.test_K, bound=bound) for name, net in nets.items()}
    account = _account(train, test)
    worse_K = np.minimum(jumpboard_pop.test_K, bound) - np.minimum(old.test_K, bound)
    margin_lower = -empirical_bernstein_upper(worse_K, low=-bound, high=bound, level=delta)
    delta_erm_pop = train["jumpboard_pop"] - train["new"]
    eps_m = deviation_bound(block, num_samples=num_train, bound=bound, delta=delta)
    eps_k = deviation_bound(block, num_samples=num_test, bound=bound, delta=delta)
    certain = max(margin_lower, 0.0)
    return TestRiskReport(
        num_train=num_train,
        num_test=num_test,
        bound=bound,
        delta=delta,
        num_truncated=sum(int((x_N > bound).sum()) for net in nets.values() for x_N in (net.train_M, net.test_K)),
        old_test=test["old"],
        new_test=test["new"],
        delta_r=test["old"] - test["jumpboard_pop"],
        delta_r_lower=margin_lower,
        delta_r_test=account.delta_r,
        delta_erm=account.delta_erm,
        delta_erm_pop=delta_erm_pop,
        gamma=account.gamma,
        identity_residual=account.residual,
        eps_m=eps_m,
        eps_k=eps_k,
        route_a=_route(
            "A",
            bound=test["old"] - margin_lower / 2 - delta_erm_pop + 2 * eps_m,
            probability=1 - 2 * delta - math.exp(-num_test * certain**2 / (8 * bound**2)),
            old_test=test["old"],
            delta_erm=delta_erm_pop,
            margin_lower=margin_lower,
        ),
        route_b=_route(
            "B",
            bound=test["old"] - account.delta_r - account.delta_erm + 2 * (eps_m + eps_k),
            probability=1 - 2 * delta,
            old_test=test["old"],
            delta_erm=account.delta_erm,
        ),
        normalisation_margin=_normalisation_margin(smallest_rms, norm_eps),
    )


def _account(train: dict[str, float], test: dict[str, float]) -> Ledger:
    """The exact three-term split of the test-loss change, from the training jumpboard."""
    return Ledger(
        step="",
        old_train=train["old"],
        old_val=test["old"],
        jumpboard_train=train["jumpboard_train"],
        jumpboard_val=test["jumpboard_train"],
        new_train=train["new"],
        new_val=test["new"],
        fallback=False,
    )


def _route(
    name: Literal["A", "B"],
    *,
    bound: float,
    probability: float,
    old_test: float,
    delta_erm: float,
    margin_lower: float | None = None,
) -> Route:
    unmet = None
    if delta_erm < 0:
        unmet = f"training ended {-delta_erm:.3g} nats above its jumpboard on the training sample"
    elif margin_lower is not None and margin_lower <= 0:
        unmet = f"the population margin is not certainly positive (lower limit {margin_lower:+.3g})"
    return Route(
        name=name,
        bound=bound,
        probability=probability,
        unmet=unmet,
        is_vacuous=bound >= old_test or probability <= 0,
    )


def _normalisation_margin(smallest_rms: float | None, norm_eps: float | None) -> float | None:
    """Smallest rms over sqrt(eps); infinite for a norm without eps."""
    if smallest_rms is None or norm_eps is None:
        return None
    return smallest_rms / math.sqrt(norm_eps) if norm_eps > 0 else math.inf


def _mean(losses_N: FloatArray, *, bound: float) -> float:
    return float(np.minimum(losses_N, bound).mean())


def _check_losses(nets: dict[str, NetworkLosses]) -> None:
    """All networks on the same samples, with losses that a bound from above makes bounded."""
    for split, smallest in (("train_M", 1), ("test_K", 2)):
        shape = getattr(nets["old"], split).shape
        if len(shape) != 1 or shape[0] < smallest:
            raise ValueError(f"{split} of the old network must be a vector of at least {smallest} losses, got {shape}")
        for name, net in nets.items():
            losses_N = getattr(net, split)
            if losses_N.shape != shape:
                raise ValueError(
                    f"{split} of {name} has shape {losses_N.shape}, that of the old network {shape}: evaluate all "
                    "networks on the same samples"
                )
            if not (losses_N >= 0).all():
                raise ValueError(f"{split} of {name} has a loss that is negative or not a number")
