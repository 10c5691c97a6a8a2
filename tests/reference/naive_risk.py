"""Naive twins of limits, test-risk routes and probe sizes: formulas of MATH.md 4 typed as they stand, with plain loops.

Slow on purpose, and free of the package under test. Section numbers are those of MATH.md.
"""

import math
from statistics import NormalDist


def mean(values) -> float:
    """Sum over count."""
    return math.fsum(float(v) for v in values) / len(values)


# --- 4.4: limits ----------------------------------------------------------------------------------


def empirical_bernstein_upper(values, *, low: float, high: float, level: float) -> float:
    """Mean + sqrt(2 v ln(2/d)/n) + 7 (hi - lo) ln(2/d)/(3(n-1)), v as half the mean squared difference of pairs."""
    n = len(values)
    pairs = [(values[i] - values[j]) ** 2 for i in range(n) for j in range(n) if i < j]
    v = math.fsum(pairs) / (n * (n - 1))
    log_term = math.log(2.0 / level)
    return mean(values) + math.sqrt(2 * v * log_term / n) + 7 * (high - low) * log_term / (3 * (n - 1))


def confidence_sequence(values, *, low: float, high: float, level: float) -> list[tuple[float, float]]:
    """(centre, radius) after each sample; each computed from the start again."""
    out = []
    for t in range(1, len(values) + 1):
        x = [(float(v) - low) / (high - low) for v in values[:t]]
        weighted = bets = cost = 0.0
        for i in range(1, t + 1):
            seen = x[: i - 1]
            mu_before = (0.5 + sum(seen)) / (len(seen) + 1)
            spread = 0.25
            for j in range(1, len(seen) + 1):
                mu_j = (0.5 + sum(seen[:j])) / (j + 1)
                spread += (seen[j - 1] - mu_j) ** 2
            s2_before = spread / (len(seen) + 1)
            lam = min(math.sqrt(2 * math.log(2 / level) / (s2_before * i * math.log(1 + i))), 0.5)
            v_i = 4 * (x[i - 1] - mu_before) ** 2
            psi = (-math.log(1 - lam) - lam) / 4
            weighted += lam * x[i - 1]
            bets += lam
            cost += v_i * psi
        centre = weighted / bets
        radius = (math.log(2 / level) + cost) / bets
        out.append((low + (high - low) * centre, (high - low) * radius))
    return out


def spend(level: float, *, look: int) -> float:
    """d_j = d 6/(pi^2 j^2) for j = look + 1."""
    j = look + 1
    return level * 6.0 / (math.pi * math.pi * j * j)


def paired_changes(old, new, *, bound: float) -> list[float]:
    """New - old, cut at +-bound; what is no number is the worst."""
    out = []
    for a, b in zip(old, new, strict=True):
        d = float(b) - float(a)
        out.append(bound if math.isnan(d) else bound if d > bound else -bound if d < -bound else d)
    return out


# --- 4.1, 4.2, 4.5: routes ------------------------------------------------------------------------


def truncated_mean(losses, bound: float) -> float:
    """Mean of min(loss, B)."""
    return mean([bound if x > bound else x for x in losses])


def epsilon(*, lz: float, b: float, d: int, k: int, n: int, bound: float, delta: float) -> float:
    """2 R + B sqrt(ln(2/d)/(2N)), R = sqrt(2) Lz b sqrt(d k/N)."""
    r = math.sqrt(2.0) * lz * b * math.sqrt(d * k / n)
    return 2 * r + bound * math.sqrt(math.log(2 / delta) / (2 * n))


def hoeffding_failure(*, margin: float, k: int, bound: float) -> float:
    """P(mean of K differences in [-B, B] is margin/2 above its expectation) <= exp(-2 K t^2/range^2)."""
    t, value_range = margin / 2, 2 * bound
    return math.exp(-2 * k * t**2 / value_range**2)


def routes(losses: dict[str, tuple[list, list]], *, bound, delta, lz, b, d, k) -> dict[str, float]:
    """All terms from {network: (train losses, test losses)} with networks old, pop, s, new."""
    on_s = {name: truncated_mean(pair[0], bound) for name, pair in losses.items()}
    on_test = {name: truncated_mean(pair[1], bound) for name, pair in losses.items()}
    m, num_test = len(losses["old"][0]), len(losses["old"][1])
    eps_m = epsilon(lz=lz, b=b, d=d, k=k, n=m, bound=bound, delta=delta)
    eps_k = epsilon(lz=lz, b=b, d=d, k=k, n=num_test, bound=bound, delta=delta)
    worse = [min(p, bound) - min(o, bound) for p, o in zip(losses["pop"][1], losses["old"][1], strict=True)]
    margin_lower = -empirical_bernstein_upper(worse, low=-bound, high=bound, level=delta)
    erm_pop, erm_s = on_s["pop"] - on_s["new"], on_s["s"] - on_s["new"]
    margin_test = on_test["old"] - on_test["s"]
    gap_new, gap_s = on_test["new"] - on_s["new"], on_test["s"] - on_s["s"]
    return {
        "delta_r": on_test["old"] - on_test["pop"],
        "delta_r_lower": margin_lower,
        "delta_r_test": margin_test,
        "delta_erm": erm_s,
        "delta_erm_pop": erm_pop,
        "gamma": gap_new - gap_s,
        "eps_m": eps_m,
        "eps_k": eps_k,
        "bound_a": on_test["old"] - margin_lower / 2 - erm_pop + 2 * eps_m,
        "probability_a": 1 - delta - delta - hoeffding_failure(margin=max(margin_lower, 0.0), k=num_test, bound=bound),
        "bound_b": on_test["old"] - margin_test - erm_s + 2 * (eps_m + eps_k),
        "probability_b": 1 - delta - delta,
        "realised_change": on_test["new"] - on_test["old"],
    }


# --- 2.3: how many probe samples decide -----------------------------------------------------------


class Population:
    """A certificate as a function of the sample size: T, v1, lmax(C), H2 stay, n varies; gain = c sqrt(score)."""

    def __init__(self, *, score, v1, largest, h2, c, level, num_candidates):
        self.score, self.v1, self.largest, self.h2, self.c = score, v1, largest, h2, c
        self.num_candidates = num_candidates
        self.z = NormalDist().inv_cdf(1 - level)
        self.z_each = NormalDist().inv_cdf(1 - level / num_candidates)

    def gain(self, score: float) -> float:
        return self.c * math.sqrt(max(score, 0.0))

    def noise(self, n: float) -> float:
        """sd0, for large n."""
        return math.sqrt(2 * self.h2) / n

    def lower(self, n: float) -> float:
        return self.score - self.z_each * math.sqrt(4 * self.v1 / n + self.noise(n) ** 2)

    def upper(self, n: float) -> float:
        """(7)."""
        a = 4 * self.z**2 * self.largest / n
        b = self.z**2 * self.noise(n) ** 2
        return max(self.score, 0.0) + a / 2 + math.sqrt(a * a / 4 + a * max(self.score, 0.0) + b)

    def first_deciding(self, tolerance: float) -> float:
        """Smallest n (as a real number) at which the limit is on the side of the estimate, by bisection."""
        above = self.gain(self.score) > tolerance

        def decides(n: float) -> bool:
            return self.gain(self.lower(n)) > tolerance if above else self.gain(self.upper(n)) < tolerance

        low, high = 1e-9, 1.0
        while not decides(high):
            high *= 2
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (low, middle) if decides(middle) else (middle, high)
        return high
