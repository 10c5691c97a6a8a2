r"""What a certificate promises, held against synthetic gradients of known score: the statistical table.

    python benchmarks/calibration.py             # about six minutes on one core
    python benchmarks/calibration.py --draws 50  # a quick look

Features of a sample are rectified uniform numbers, mixed so that scales differ by a factor of 10, and the constant
one; its gradient is noise (Gaussian, or multivariate Student of 5 degrees) of a given
covariance plus a linear signal. Second moment, score, covariance of the whitened cross-gradients and transfer are
then known in closed form, and everything else takes the path of a probe: a pool of ten samples a feature of its own,
whitening, inflation, up to 32 rows, Student limits, sign flips, verdicts. Step size and stream norm are 1, so that a
gain is the root of a score. The known score is that of the ridged family, which the certificate speaks of.

Synthetic sites, figures and table share one file, longer than a module of the service, so that it runs by itself.

Shape legend: B = draws, R = rows, D = width of the stream, K = features with the constant one, N = samples.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from growth_service.core import certificate as cert
from growth_service.core.score import FloatArray, Whitener, pool_inflation, predicted_gain, whitener
from growth_service.probing.prepare import chunk_size

LEVEL = 0.05
RIDGE = 1e-3
POOL_PER_FEATURE = 10
DRAWS_PER_POOL = 10
DEGREES = 5
"""Of the heavy-tailed gradients: the fourth moment of a cross-gradient is just not finite."""
BATCH_NUMBERS = 300_000
"""Random numbers drawn at a time: as many as a cache holds."""


# --- synthetic sites ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class World:
    """The law of features and gradients at one site."""

    width: int
    features: int
    effective_rank: float
    """(tr C)^2/||C||_F^2 of the gradients, from 1 to the width (independent coordinates of equal variance)."""
    heavy: bool = False
    fold: int = 1
    """Entries of a row that are added with random signs, as a shorter sketch would: it costs power."""

    @property
    def name(self) -> str:
        """For a table."""
        tails = ", heavy tails" if self.heavy else ""
        folded = f", folded {self.fold}x" if self.fold > 1 else ""
        return f"d {self.width}, k {self.features}, r_eff {self.effective_rank:g}{tails}{folded}"

    @cached_property
    def correlation(self) -> float:
        """Between any two coordinates of a gradient: r_eff = d^2/(d + d(d - 1) rho^2)."""
        d = self.width
        return math.sqrt((d / self.effective_rank - 1) / (d - 1)) if self.effective_rank < d else 0.0

    @cached_property
    def mixing_KK(self) -> FloatArray:
        """Turns rectified coordinates and the constant one into features whose scales differ by a factor of 10."""
        plain = self.features - 1
        turn_KK = np.linalg.qr(np.random.default_rng(self.features).standard_normal((plain, plain)))[0]
        mixing_KK = np.zeros((self.features, self.features))
        mixing_KK[:-1, :-1] = turn_KK * np.logspace(0, -1, plain)
        mixing_KK[-1, -1] = 1.0
        return mixing_KK

    @cached_property
    def sigma_KK(self) -> FloatArray:
        """Second moment of the features: max(u, 0) of u uniform in [-1, 1) has mean 1/4 and mean square 1/6."""
        mean_K = np.append(np.full(self.features - 1, 1 / 4), 1.0)
        variance_K = np.append(np.full(self.features - 1, 1 / 6 - 1 / 16), 0.0)
        found: FloatArray = self.mixing_KK.T @ (np.outer(mean_K, mean_K) + np.diag(variance_K)) @ self.mixing_KK
        return found

    @cached_property
    def ridged_KK(self) -> FloatArray:
        """Sigma + lambda."""
        return self.sigma_KK + RIDGE * float(np.trace(self.sigma_KK)) / self.features * np.eye(self.features)

    @cached_property
    def shares_K(self) -> FloatArray:
        """Eigenvalues of the whitened second moment, s/(s + lambda), in falling order."""
        eigen_K = np.linalg.eigvalsh(self.sigma_KK)
        return (eigen_K / (eigen_K + RIDGE * eigen_K.mean()))[::-1]

    @property
    def largest(self) -> float:
        """Largest eigenvalue of the covariance of one sample's whitened cross-gradient, where there is no signal."""
        return (1 + (self.width - 1) * self.correlation) * float(self.shares_K[0])

    @property
    def frobenius(self) -> float:
        """Frobenius norm of the same covariance."""
        return self.width / math.sqrt(self.effective_rank) * float(np.linalg.norm(self.shares_K))

    def noise_sd(self, num_samples: int) -> float:
        """Standard deviation of T where there is no signal."""
        return math.sqrt(2) * self.frobenius / num_samples

    def draw_features(self, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
        """``shape`` + ``[K]``."""
        plain = rng.random((math.prod(shape), self.features), dtype=np.float32)
        np.subtract(2 * plain, 1, out=plain)
        np.maximum(plain, 0, out=plain)
        plain[:, -1] = 1.0
        return (plain @ self.mixing_KK.astype(np.float32)).reshape(*shape, self.features)

    def draw_noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
        """Gradients without a signal, of variance 1 a coordinate. ``shape`` + ``[D]``."""
        noise = rng.standard_normal((*shape, self.width), dtype=np.float32)
        if self.correlation:
            noise *= np.float32(math.sqrt(1 - self.correlation))
            noise += np.float32(math.sqrt(self.correlation)) * rng.standard_normal((*shape, 1), dtype=np.float32)
        if self.heavy:
            chi2 = 2 * rng.standard_gamma(DEGREES / 2, size=(*shape, 1), dtype=np.float32)
            noise *= np.sqrt(np.float32(DEGREES - 2) / chi2)
        return noise

    def cross_gradient(self, score: float, rng: np.random.Generator, *, aligned: bool) -> FloatArray:
        """A population cross-gradient G of the given (ridged) score. ``[D, K]``.

        Args:
            score: tr(G (Sigma + lambda)^-1 G^T).
            rng: Of the direction.
            aligned: One direction, that of the largest noise; else spread evenly over all directions.
        """
        eigen_K, basis_KK = np.linalg.eigh(self.ridged_KK)
        if aligned:
            whitened_DK = np.outer(np.ones(self.width), basis_KK[:, -1])
        else:
            whitened_DK = rng.standard_normal((self.width, self.features))
        whitened_DK *= math.sqrt(score) / float(np.linalg.norm(whitened_DK))
        found: FloatArray = whitened_DK @ (basis_KK * np.sqrt(eigen_K)) @ basis_KK.T
        return found


class Pool(NamedTuple):
    """What a probe knows of the features before it sees a gradient."""

    whitening: Whitener
    inflation: float


def draw_pool(world: World, rng: np.random.Generator) -> Pool:
    """Whiten with samples of their own, in two halves."""
    phi_NK = world.draw_features((POOL_PER_FEATURE * world.features,), rng).astype(np.float64)
    halves = [part.T @ part / len(part) for part in np.array_split(phi_NK, 2)]
    whole_KK = phi_NK.T @ phi_NK / len(phi_NK)
    return Pool(whitener(whole_KK, ridge=RIDGE), pool_inflation(*halves, ridge=RIDGE))


class Look(NamedTuple):
    """One site seen once, and what is true there."""

    gram_NN: FloatArray
    stat: cert.UStatistic
    score: float
    """S, in the ridged family of the true second moment."""
    pool_score: float
    """What T is unbiased for with the pool at hand."""
    moved: cert.Transfer | None
    """Along the training direction; None: there were no training samples."""
    rate: float
    """X_n of the training gradient at hand, in the true metric and against the true gradient."""


def looks(
    world: World,
    *,
    num_samples: int,
    draws: int,
    rng: np.random.Generator,
    score: float = 0.0,
    aligned: bool = False,
    num_train: int = 0,
) -> Iterator[Look]:
    """Independent looks at sites of one law, with a new pool every few."""
    for first in range(0, draws, DRAWS_PER_POOL):
        pool = draw_pool(world, rng)
        cross_DK = (
            world.cross_gradient(score, rng, aligned=aligned) if score else np.zeros((world.width, world.features))
        )
        weights_DK = np.linalg.solve(world.sigma_KK, cross_DK.T).T
        sums_BRDK = _row_sums(
            world, weights_DK, num_samples=num_samples, draws=min(DRAWS_PER_POOL, draws - first), rng=rng
        )
        for rows_RDK in sums_BRDK:
            train_DK = None
            if num_train:
                train_DK = next(_row_sums(world, weights_DK, num_samples=num_train, draws=1, rng=rng)).sum(
                    axis=0, dtype=np.float64
                )
            yield _look(world, pool, rows_RDK, cross_DK, num_samples, train_DK=train_DK, num_train=num_train, rng=rng)


def _row_sums(
    world: World, weights_DK: FloatArray, *, num_samples: int, draws: int, rng: np.random.Generator
) -> Iterator[FloatArray]:
    """Sums of cross-gradients over consecutive samples, one draw after the other. ``[R, D, K]``."""
    size = chunk_size(num_samples)
    num_rows = -(-num_samples // size)
    at_once = max(1, BATCH_NUMBERS // (num_samples * (world.width + world.features)))
    for first in range(0, draws, at_once):
        shape = (min(at_once, draws - first), num_rows * size)
        phi_BNK = world.draw_features(shape, rng)
        g_BND = world.draw_noise(shape, rng)
        if weights_DK.any():
            g_BND += phi_BNK @ weights_DK.T.astype(np.float32)
        g_BND[:, num_samples:] = 0.0  # the last row is shorter
        g_BRND = g_BND.reshape(shape[0], num_rows, size, world.width)
        phi_BRNK = phi_BNK.reshape(shape[0], num_rows, size, world.features)
        yield from np.matmul(g_BRND.swapaxes(-1, -2), phi_BRNK)


def _look(
    world: World,
    pool: Pool,
    rows_RDK: FloatArray,
    cross_DK: FloatArray,
    num_samples: int,
    *,
    train_DK: FloatArray | None,
    num_train: int,
    rng: np.random.Generator,
) -> Look:
    """The path from row sums to a statistic, as in ``growth_service.probing.certify``."""
    num_rows = len(rows_RDK)
    scale = num_rows / num_samples
    root_KK = pool.whitening.inv_sqrt.astype(np.float32)  # float32 as on a probe's device, sums in float64
    rows_RM = (rows_RDK.reshape(-1, world.features) @ root_KK).reshape(num_rows, -1).astype(np.float64)
    plug_in = float(np.square(rows_RM.sum(axis=0) / num_samples).sum())
    if world.fold > 1:
        rows_RM = _folded(rows_RM, world.fold, rng)
    gram_NN = rows_RM @ rows_RM.T * scale**2 / pool.inflation
    stat = cert.u_statistic(gram_NN, num_samples=num_samples, plug_in=plug_in / pool.inflation)
    moved, rate = None, 0.0
    if train_DK is not None:
        white_DK = pool.whitening.whiten(train_DK / num_train)
        along_DK = pool.whitening.back(white_DK)
        along_N = np.einsum("rdk,dk->r", rows_RDK, along_DK) * scale / math.sqrt(pool.inflation)
        moved = cert.transfer(along_N, train_score=float(np.square(white_DK).sum()), level=LEVEL)
        true_DK = np.linalg.solve(world.ridged_KK, train_DK.T).T
        rate = float((true_DK * cross_DK).sum() / math.sqrt((true_DK * train_DK).sum()))
    return Look(
        gram_NN=gram_NN,
        stat=stat,
        score=float((np.linalg.solve(world.ridged_KK, cross_DK.T).T * cross_DK).sum()),
        pool_score=float(np.square(pool.whitening.whiten(cross_DK)).sum()) / pool.inflation,
        moved=moved,
        rate=rate,
    )


def _folded(rows_RM: FloatArray, fold: int, rng: np.random.Generator) -> FloatArray:
    """Entries of all rows added with the same random signs, ``fold`` at a time."""
    numbers = -(-rows_RM.shape[1] // fold)
    signed_RM = rows_RM * (rng.integers(0, 2, size=rows_RM.shape[1]) * 2.0 - 1.0)
    padded_RM = np.pad(signed_RM, ((0, 0), (0, numbers * fold - rows_RM.shape[1])))
    found: FloatArray = padded_RM.reshape(len(rows_RM), fold, numbers).sum(axis=1)
    return found


# --- from looks to verdicts -----------------------------------------------------------------------


def gain(score: float) -> float:
    """Predicted gain at step size and stream norm 1, far below the loss."""
    return predicted_gain(score, stream_norm=1.0, r_max=1.0, loss_nats=1e9)


def judge(look: Look, *, tolerance: float, num_candidates: int, seed: int) -> cert.Verdict:
    """The verdict on one site among ``num_candidates``, as in ``growth_service.probing.certify``."""
    threshold = LEVEL / num_candidates
    gains = cert.Gains(
        lower=gain(look.stat.lower_limit(threshold)),
        upper=gain(look.stat.upper_limit(LEVEL)),
        transfer_upper=look.moved.upper if look.moved is not None else math.inf,
        p_value=1.0,
    )
    if gains.lower > tolerance:  # only then is the p-value asked for: a draw that fails here is decided without it
        p_value = cert.significance(
            look.gram_NN,
            look.stat,
            threshold=threshold,
            max_resamples=math.ceil(20 * num_candidates / LEVEL),
            seed=seed,
        )
        gains = replace(gains, p_value=p_value.value)
    return cert.candidate_verdict(gains, tolerance=tolerance, level=LEVEL, num_candidates=num_candidates)


def samples_needed(world: World, *, tolerance: float) -> float:
    """Samples from which formula (7) calls a site without signal saturated, where T is zero.

    At T = 0 the upper limit is (a + sqrt(a^2 + 4 b))/2 with a = 4 z^2 lmax/n and b = 2 z^2 ||C||_F^2/n^2, so it falls
    as 1/n; it is below the squared tolerance (a gain is the root of a score here) from
    n = (2 z^2 lmax + sqrt(4 z^4 lmax^2 + 2 z^2 ||C||_F^2))/tolerance^2 on.

    Args:
        world: Gives the true lmax and ||C||_F.
        tolerance: Smallest gain that counts.
    """
    z2 = NormalDist().inv_cdf(1 - LEVEL) ** 2
    linear = 2 * z2 * world.largest
    return (linear + math.sqrt(linear**2 + 2 * z2 * world.frobenius**2)) / tolerance**2


def tolerance_at(world: World, *, num_samples: float) -> float:
    """The tolerance for which :func:`samples_needed` gives ``num_samples``."""
    return math.sqrt(samples_needed(world, tolerance=1.0) / num_samples)


# --- figures --------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """One line of the table."""

    claim: str
    where: str
    draws: int
    value: float
    low: float
    high: float
    """95 % interval of the value."""
    bar: str
    held: bool | None
    """None: no bar, for information."""


def share(
    claim: str,
    where: str,
    hits: Iterable[bool],
    *,
    at_least: float = 0.0,
    at_most: float = 1.0,
    information: bool = False,
) -> Figure:
    """A share of draws with its interval (Wilson 1927), held against its bar unless that is for information."""
    marks = list(hits)
    n, value = len(marks), sum(marks) / len(marks)
    z2 = NormalDist().inv_cdf(0.975) ** 2
    middle = (value + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (value * (1 - value) / n + z2 / (4 * n**2))) / (1 + z2 / n)
    return Figure(
        claim=claim,
        where=where,
        draws=n,
        value=value,
        low=middle - half,
        high=middle + half,
        bar=("nominal " if information else "") + (f">= {at_least:g}" if at_least > 0 else f"<= {at_most:g}"),
        held=None if information else at_least <= value <= at_most,
    )


def extreme(figures: list[Figure]) -> list[Figure]:
    """Of each claim the figure nearest to its bar: the highest of shares that should be low, else the lowest."""
    found = []
    for claim in dict.fromkeys(f.claim for f in figures):
        mine = [f for f in figures if f.claim == claim]
        worst = max(mine, key=lambda f: f.value if "<=" in f.bar else -f.value)
        found.append(worst._replace(claim=f"{claim} (worst of {len(mine)})"))
    return found


def slope(world: World, *, signal: bool, draws: int, rng: np.random.Generator) -> Figure:
    """(a) Slope of log RMSE of T against log n, around what T is unbiased for with the pool at hand.

    Without a signal n runs from 200 to 5,000. With one it starts at 500, where the linear part of the variance is
    20 times the noise floor's: the slope of their sum is then that of the linear part within about 0.02. The signal
    lies along the largest noise where directions differ, else it is spread: a strong one in one direction would
    itself make noise of second order.
    """
    sizes = (500, 1000, 2000, 5000) if signal else (200, 500, 1000, 2000, 5000)
    aligned = world.correlation > 0
    along = world.largest if aligned else 1.0
    score = 20 * 2 * world.frobenius**2 / (4 * along * sizes[0]) if signal else 0.0
    squares = [
        np.array(
            [
                (look.stat.value - look.pool_score) ** 2
                for look in looks(world, num_samples=n, draws=draws, rng=rng, score=score, aligned=aligned)
            ]
        )
        for n in sizes
    ]
    centred = np.log(sizes) - np.mean(np.log(sizes))
    weights = centred / np.square(centred).sum() / 2  # of a logarithm of a mean square
    means = np.array([sq.mean() for sq in squares])
    errors = np.array([sq.std(ddof=1) / math.sqrt(draws) for sq in squares]) / means
    value, half = float(weights @ np.log(means)), 1.96 * float(np.linalg.norm(weights * errors))
    wanted = -0.5 if signal else -1.0
    return Figure(
        claim="a: slope of RMSE(T) in n",
        where=f"{world.name}, {f'S = {score:.2g}' if signal else 'S = 0'}",
        draws=draws * len(sizes),
        value=value,
        low=value - half,
        high=value + half,
        bar=f"{wanted:g} +- 0.05",
        held=abs(value - wanted) <= 0.05,
    )


def coverage(
    world: World, *, sizes: Iterable[int], snrs: Iterable[float], draws: int, rng: np.random.Generator
) -> list[Figure]:
    """(b) How often the upper limit is above the true score, and the lower one below it (for information)."""
    found = []
    for n in sizes:
        for snr in snrs:
            for aligned in (False, True):
                seen = list(
                    looks(world, num_samples=n, draws=draws, rng=rng, score=snr * world.noise_sd(n), aligned=aligned)
                )
                where = f"{world.name}, n {n}, SNR {snr:g}, {'one direction' if aligned else 'spread'}"
                upper = (look.stat.upper_limit(LEVEL) >= look.score for look in seen)
                lower = (look.stat.lower_limit(LEVEL) <= look.score for look in seen)
                found.append(share("b: upper limit covers S", where, upper, at_least=0.95))
                found.append(share("b: lower limit covers S", where, lower, at_least=0.95, information=True))
    return found


def null_networks(
    world: World, *, num_samples: int, site_counts: Iterable[int], draws: int, rng: np.random.Generator
) -> list[Figure]:
    """(c) and (e): networks without any signal, at every number of sites.

    ``useful`` is asked for any gain above zero, ``saturated`` for the tolerance at which formula (7) needs a quarter
    of the samples there are.
    """
    counts = sorted(site_counts)
    tolerance = tolerance_at(world, num_samples=num_samples / 4)
    useful: dict[int, list[bool]] = {m: [] for m in counts}
    saturated: dict[int, list[bool]] = {m: [] for m in counts}
    for draw in range(draws):
        sites = list(looks(world, num_samples=num_samples, draws=counts[-1], rng=rng))
        for m in counts:
            for wanted, marks, tol in (("useful", useful[m], 0.0), ("saturated", saturated[m], tolerance)):
                verdicts = [judge(s, tolerance=tol, num_candidates=m, seed=draw) for s in sites[:m]]
                marks.append(cert.network_verdict(verdicts) == wanted)
    where = f"{world.name}, n {num_samples}"
    figures = [share("c: useful, S = 0", f"{where}, {m} sites", useful[m], at_most=0.07) for m in counts]
    return figures + [
        share("e: saturated, S = 0, 4 x samples needed", f"{where}, {m} sites", saturated[m], at_least=0.95)
        for m in counts
    ]


def false_useful_at_tolerance(
    world: World, *, num_samples: int, num_sites: int, snr: float, draws: int, rng: np.random.Generator
) -> Figure:
    """(c) with the true gain of every site just at the tolerance: no site has a gain above it."""
    score = snr * world.noise_sd(num_samples)
    marks = []
    for draw in range(draws):
        sites = looks(world, num_samples=num_samples, draws=num_sites, rng=rng, score=score)
        verdicts = [judge(s, tolerance=gain(s.score), num_candidates=num_sites, seed=draw) for s in sites]
        marks.append(cert.network_verdict(verdicts) == "useful")
    where = f"{world.name}, n {num_samples}, {num_sites} sites, SNR {snr:g}"
    return share("c: useful, gain at the tolerance", where, marks, at_most=0.07)


def false_stops(world: World, *, num_samples: int, snr: float, draws: int, rng: np.random.Generator) -> list[Figure]:
    """(d) One site whose true gain (of the score; of the training direction) is twice the tolerance.

    The training direction comes from four times as many independent samples as the certificate. It is judged on its
    own, since a certain gain of the score would hide what its limit says; that limit is also held against its
    nominal level of 0.05, with the true gain just at the tolerance (for information).
    """
    seen = list(
        looks(
            world,
            num_samples=num_samples,
            draws=draws,
            rng=rng,
            score=snr * world.noise_sd(num_samples),
            num_train=4 * num_samples,
        )
    )
    where = f"{world.name}, n {num_samples}, SNR {snr:g}"
    saturated = [
        judge(s._replace(moved=None), tolerance=gain(s.score) / 2, num_candidates=1, seed=i) == "saturated"
        for i, s in enumerate(seen)
    ]
    stopped, at_tolerance = [], []
    for s in seen:
        gains = cert.Gains(
            lower=0.0, upper=math.inf, transfer_upper=s.moved.upper if s.moved else math.inf, p_value=1.0
        )
        for marks, tolerance in ((stopped, s.rate / 2), (at_tolerance, s.rate)):
            verdict = cert.candidate_verdict(gains, tolerance=tolerance, level=LEVEL, num_candidates=1)
            marks.append(verdict == "no_transferable_gain")
    return [
        share("d: saturated, gain 2 x tolerance", where, saturated, at_most=0.05),
        share("d: no transferable gain, it is 2 x tolerance", where, stopped, at_most=0.05),
        share("d: no transferable gain, it is the tolerance", where, at_tolerance, at_most=0.05, information=True),
    ]


def power(world: World, *, num_samples: int, draws: int, rng: np.random.Generator) -> list[Figure]:
    """(f) A signal of five noise floors called useful: at one site of 8, of 32, and at all of 8 sites.

    Any gain above zero counts. Of one site of many, it is that very site that must be found; the others have no
    signal, and do not change what it takes.
    """
    score = 5 * world.noise_sd(num_samples)
    found: dict[str, list[bool]] = {"one site of 8": [], "one site of 32": [], "all 8 sites": []}
    for draw in range(draws):
        sites = list(looks(world, num_samples=num_samples, draws=8, rng=rng, score=score))
        for name, m in (("one site of 8", 8), ("one site of 32", 32)):
            found[name].append(judge(sites[0], tolerance=0.0, num_candidates=m, seed=draw) == "useful")
        verdicts = [judge(s, tolerance=0.0, num_candidates=8, seed=draw) for s in sites]
        found["all 8 sites"].append(cert.network_verdict(verdicts) == "useful")
    where = f"{world.name}, n {num_samples}"
    return [share("f: useful, SNR 5", f"{where}, {name}", marks, at_least=0.9) for name, marks in found.items()]


def pool_error(world: World, *, pools: int, rng: np.random.Generator) -> Figure:
    """What is left of the pool's error after its inflation is divided out, where it is largest: in one direction."""
    cross_DK = world.cross_gradient(1.0, rng, aligned=True)
    drawn = (draw_pool(world, rng) for _ in range(pools))
    values = np.array([np.square(p.whitening.whiten(cross_DK)).sum() / p.inflation for p in drawn])
    return Figure(
        "pool: score it leaves of S = 1, one direction (mean; 2.5 and 97.5 %)",
        world.name,
        pools,
        float(values.mean()),
        float(np.quantile(values, 0.025)),
        float(np.quantile(values, 0.975)),
        "-",
        None,
    )


# --- the table ------------------------------------------------------------------------------------

SMALL = World(width=16, features=33, effective_rank=16)
SMALL_EQUAL = World(width=16, features=33, effective_rank=2, heavy=True)
SMALL_MIDDLE = World(width=16, features=33, effective_rank=8, heavy=True)
LARGE = World(width=64, features=129, effective_rank=64, heavy=True)
LARGE_EQUAL = World(width=64, features=129, effective_rank=2)


def plan(draws: int) -> Iterator[Callable[[np.random.Generator], list[Figure]]]:
    """All figures of the long form, one step after the other; large sites get fewer settings and draws."""
    few = max(20, draws * 2 // 5)
    for world, number in ((SMALL, 2 * draws), (SMALL_EQUAL, 2 * draws), (LARGE, 2 * few)):
        for signal in (False, True):
            yield lambda rng, w=world, s=signal, b=number: [slope(w, signal=s, draws=b, rng=rng)]
    for world in (SMALL, LARGE):
        yield lambda rng, w=world: [pool_error(w, pools=draws, rng=rng)]
    for world, sizes, number in (
        (SMALL, (200, 1000, 5000), draws),
        (SMALL_MIDDLE, (200, 1000, 5000), draws),
        (SMALL_EQUAL, (200, 1000, 5000), draws),
        (LARGE, (1000,), few),
        (LARGE_EQUAL, (1000,), few),
    ):
        yield lambda rng, w=world, n=sizes, b=number: extreme(coverage(w, sizes=n, snrs=(5, 50), draws=b, rng=rng))
    for world, n, counts, number in (
        (SMALL, 200, (8, 32), draws),
        (SMALL, 1000, (8, 32), draws),
        (SMALL_MIDDLE, 1000, (8, 32), draws),
        (SMALL_EQUAL, 200, (8, 32), draws),
        (SMALL_EQUAL, 1000, (8, 32), draws),
        (SMALL_EQUAL, 5000, (8,), draws),
        (LARGE, 1000, (8,), draws),
        (LARGE_EQUAL, 1000, (8, 32), few),
    ):
        yield lambda rng, w=world, n=n, c=counts, b=number: null_networks(
            w, num_samples=n, site_counts=c, draws=b, rng=rng
        )
    for world in (SMALL, SMALL_EQUAL):
        for snr in (5, 50):
            yield lambda rng, w=world, s=snr: [
                false_useful_at_tolerance(w, num_samples=200, num_sites=8, snr=s, draws=draws, rng=rng)
            ]
    for world, sizes, number in (
        (SMALL, (200, 1000), draws),
        (SMALL_EQUAL, (200, 1000), draws),
        (LARGE, (1000,), few),
    ):
        yield lambda rng, w=world, sizes=sizes, b=number: extreme(
            [f for n in sizes for snr in (1, 5, 20) for f in false_stops(w, num_samples=n, snr=snr, draws=b, rng=rng)]
        )
    for world, n in ((SMALL, 200), (SMALL, 1000), (SMALL_MIDDLE, 1000), (SMALL_EQUAL, 1000), (LARGE, 1000)):
        yield lambda rng, w=world, n=n: power(w, num_samples=n, draws=draws, rng=rng)


def markdown(figures: list[Figure]) -> str:
    """The table."""
    lines = ["| claim | setting | draws | figure | 95 % interval | bar | held |", "|---|---|---|---|---|---|---|"]
    for f in sorted(figures, key=lambda f: f.claim):
        held = {None: "", True: "yes", False: "**no**"}[f.held]
        lines.append(
            f"| {f.claim} | {f.where} | {f.draws} | {f.value:.3f} | {f.low:.3f} to {f.high:.3f} | {f.bar} | {held} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    figures = []
    for step, draw in enumerate(plan(options.draws)):
        figures += draw(np.random.default_rng([options.seed, step]))
        print(f"{time.perf_counter() - began:5.0f} s  {figures[-1].claim}: {figures[-1].where}", flush=True)
    print(f"\n{markdown(figures)}\n\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
