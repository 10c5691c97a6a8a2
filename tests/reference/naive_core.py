"""Naive twins of the core: each formula of MATH.md typed as it stands, with plain loops.

Slow on purpose, and free of the package under test. Section numbers are those of MATH.md.
Where the core works from a Gram matrix, a twin works from the psi_i themselves.
"""

import math
from itertools import combinations, permutations, product

import numpy as np
import scipy.linalg
import scipy.stats


def dot(a_M, b_M) -> float:
    """Inner product, one product after the other."""
    return math.fsum(float(a) * float(b) for a, b in zip(a_M, b_M, strict=True))


# --- 1.1 to 1.4: the score ------------------------------------------------------------------------


def second_moment(phi_NPK):
    """Sigma = E sum_p phi_p phi_p^T."""
    num, positions, features = phi_NPK.shape
    sigma_KK = np.zeros((features, features))
    for i in range(num):
        for p in range(positions):
            for a in range(features):
                for b in range(features):
                    sigma_KK[a, b] += phi_NPK[i, p, a] * phi_NPK[i, p, b] / num
    return sigma_KK


def unit_cross_gradient(g_PD, phi_PK):
    """G_i = sum_p g_ip phi_ip^T of one unit."""
    width, features = g_PD.shape[1], phi_PK.shape[1]
    cross_DK = np.zeros((width, features))
    for p in range(g_PD.shape[0]):
        for d in range(width):
            for k in range(features):
                cross_DK[d, k] += g_PD[p, d] * phi_PK[p, k]
    return cross_DK


def cross_gradient(g_NPD, phi_NPK):
    """G = E sum_p g_p phi_p^T."""
    return sum(unit_cross_gradient(g, phi) for g, phi in zip(g_NPD, phi_NPK, strict=True)) / g_NPD.shape[0]


def jacobian(phi_NPK, width: int):
    """J: what each entry W[d, k] of the output projection does to the stream of each unit, position, channel."""
    num, positions, features = phi_NPK.shape
    columns = []
    for d in range(width):
        for k in range(features):
            moved_NPD = np.zeros((num, positions, width))
            for i in range(num):
                for p in range(positions):
                    moved_NPD[i, p, d] = phi_NPK[i, p, k]
            columns.append(moved_NPD.ravel())
    return np.array(columns).T


def least_squares_weights(g_NPD, phi_NPK, *, ridge: float):
    """u that solves (J^T J/n + lam I) u = J^T g/n (section 1.4), by least squares on J itself."""
    num, _, width = g_NPD.shape
    features = phi_NPK.shape[2]
    lam = ridge * sum(second_moment(phi_NPK)[k, k] for k in range(features)) / features
    j_XQ = jacobian(phi_NPK, width)
    stacked = np.vstack([j_XQ, math.sqrt(lam * num) * np.eye(j_XQ.shape[1])])
    target = np.concatenate([g_NPD.ravel(), np.zeros(j_XQ.shape[1])])
    return np.linalg.lstsq(stacked, target, rcond=None)[0]


def score(g_NPD, phi_NPK, *, ridge: float) -> float:
    """S = v . u with v = J^T g/n; without a ridge it is ||Pi g||^2 = ||J u||^2/n."""
    v_Q = jacobian(phi_NPK, g_NPD.shape[2]).T @ g_NPD.ravel() / g_NPD.shape[0]
    return dot(v_Q, least_squares_weights(g_NPD, phi_NPK, ridge=ridge))


def projected_norm_sq(g_NPD, phi_NPK) -> float:
    """||Pi g||^2 by its definition: what the least-squares fit of g explains."""
    fitted_X = jacobian(phi_NPK, g_NPD.shape[2]) @ least_squares_weights(g_NPD, phi_NPK, ridge=0.0)
    return dot(fitted_X, fitted_X) / g_NPD.shape[0]


def whitened_units(g_NPD, phi_NPK, sigma_KK, *, ridge: float):
    """psi_i = vec(G_i Q) with Q = (Sigma + lam I)^(-1/2) (section 2.3)."""
    features = sigma_KK.shape[0]
    lam = ridge * sum(sigma_KK[k, k] for k in range(features)) / features
    q_KK = np.real(scipy.linalg.inv(scipy.linalg.sqrtm(sigma_KK + lam * np.eye(features))))
    return np.array([(unit_cross_gradient(g, phi) @ q_KK).ravel() for g, phi in zip(g_NPD, phi_NPK, strict=True)])


def gated_moments(phi_NPD):
    """Sigma_d = E sum_p phi_pd phi_pd^T of each row d: each has one feature of its own, and the constant one."""
    num, positions, width = phi_NPD.shape
    found_D22 = np.zeros((width, 2, 2))
    for d in range(width):
        own_NP2 = np.stack([phi_NPD[:, :, d], np.ones((num, positions))], axis=2)
        found_D22[d] = second_moment(own_NP2)
    return found_D22


def gated_cross_gradient(g_NPD, phi_NPD):
    """Row d of G: E sum_p g_pd [phi_pd, 1]."""
    num, positions, width = g_NPD.shape
    cross_D2 = np.zeros((width, 2))
    for d in range(width):
        for i in range(num):
            for p in range(positions):
                cross_D2[d] += g_NPD[i, p, d] * np.array([phi_NPD[i, p, d], 1.0]) / num
    return cross_D2


def gated_weights(g_NPD, phi_NPD, *, ridge: float):
    """Least squares of each row's gradient on that row's own features, one row after the other."""
    rows = []
    for d in range(g_NPD.shape[2]):
        own_NP2 = np.stack([phi_NPD[:, :, d], np.ones(phi_NPD.shape[:2])], axis=2)
        rows.append(least_squares_weights(g_NPD[:, :, d : d + 1], own_NP2, ridge=ridge))
    return np.array(rows)


# --- 1.6: partialling out -------------------------------------------------------------------------


def residual_features(new_NPK, old_NPO, *, ridge: float):
    """phi_perp = phi_new - B phi_old, with B the (ridged) least-squares fit on all samples and positions."""
    num, positions, old = old_NPO.shape
    lam = ridge * sum(second_moment(old_NPO)[o, o] for o in range(old)) / max(old, 1)
    rows_XO = np.vstack([old_NPO.reshape(num * positions, old), math.sqrt(lam * num) * np.eye(old)])
    target_XK = np.vstack([new_NPK.reshape(num * positions, -1), np.zeros((old, new_NPK.shape[2]))])
    fit_OK = np.linalg.lstsq(rows_XO, target_XK, rcond=None)[0]
    return (target_XK[: num * positions] - rows_XO[: num * positions] @ fit_OK).reshape(new_NPK.shape)


# --- 2.3: the pool ---------------------------------------------------------------------------------


def pool_inflation(half_a_KK, half_b_KK, *, ridge: float) -> float:
    """1 + e/(2 + e), e + 1 = mean of tr((A + lam)^-1 B)/tr((A + lam)^-1 A) and the same turned round, e >= 0."""
    features, ratios = len(half_a_KK), []
    for fit_KK, other_KK in ((half_a_KK, half_b_KK), (half_b_KK, half_a_KK)):
        lam = ridge * sum(fit_KK[k, k] for k in range(features)) / features
        inverse_KK = scipy.linalg.inv(fit_KK + lam * np.eye(features))
        ratios.append(np.trace(inverse_KK @ other_KK) / np.trace(inverse_KK @ fit_KK))
    excess = max(0.0, sum(ratios) / 2 - 1)
    return 1 + excess / (2 + excess)


# --- 2.2 and 2.3: the certificate -----------------------------------------------------------------


def u_statistic(psi_NM) -> float:
    """T, as the mean of <psi_i, psi_j> over all pairs i != j."""
    n = len(psi_NM)
    pairs = [dot(psi_NM[i], psi_NM[j]) for i in range(n) for j in range(n) if i != j]
    return math.fsum(pairs) / (n * (n - 1))


def plug_in(psi_NM) -> float:
    """||mean psi||^2, the naive score."""
    mean_M = [math.fsum(column) / len(psi_NM) for column in psi_NM.T]
    return dot(mean_M, mean_M)


def h2(psi_NM) -> float:
    """H2 = mean over i != j of <psi_i, psi_j>^2."""
    n = len(psi_NM)
    return math.fsum(dot(psi_NM[i], psi_NM[j]) ** 2 for i in range(n) for j in range(n) if i != j) / (n * (n - 1))


def noise_sd(psi_NM) -> float:
    """sd0 = sqrt(2 H2/(n(n-1)))."""
    n = len(psi_NM)
    return math.sqrt(2 * h2(psi_NM) / (n * (n - 1)))


def v1(psi_NM) -> float:
    """max(0, Var_i(h_i) - D/(n-1)), h_i = mean over j != i of H_ij, D = mean over i != j of (H_ij - h_i - h_j + T)^2."""
    n = len(psi_NM)
    h_N = [math.fsum(dot(psi_NM[i], psi_NM[j]) for j in range(n) if j != i) / (n - 1) for i in range(n)]
    mean = math.fsum(h_N) / n
    variance = math.fsum((h - mean) ** 2 for h in h_N) / (n - 1)
    degenerate = [
        (dot(psi_NM[i], psi_NM[j]) - h_N[i] - h_N[j] + mean) ** 2 for i in range(n) for j in range(n) if i != j
    ]
    return max(0.0, variance - math.fsum(degenerate) / (n * (n - 1)) / (n - 1))


def covariance(psi_NM):
    """C, entry by entry, with n - 1."""
    n, m = psi_NM.shape
    mean_M = [math.fsum(psi_NM[:, a]) / n for a in range(m)]
    cov_MM = np.zeros((m, m))
    for a in range(m):
        for b in range(m):
            cov_MM[a, b] = math.fsum((row[a] - mean_M[a]) * (row[b] - mean_M[b]) for row in psi_NM) / (n - 1)
    return cov_MM


def standard_error(psi_NM) -> float:
    """sqrt(4 v1/n + 2 H2/(n(n-1)))."""
    n = len(psi_NM)
    return math.sqrt(4 * v1(psi_NM) / n + 2 * h2(psi_NM) / (n * (n - 1)))


def u_statistic_from_plug_in(plug_in_score: float, psi_NM) -> float:
    """(6) with ||sum psi||^2 = n^2 times a plug-in score known from elsewhere."""
    n = len(psi_NM)
    return (n**2 * plug_in_score - math.fsum(dot(psi, psi) for psi in psi_NM)) / (n * (n - 1))


def degenerate(psi_NM):
    """D_ij = H_ij - h_i - h_j + T off the diagonal: what noise alone gives a pair of rows."""
    n = len(psi_NM)
    h_N = [math.fsum(dot(psi_NM[i], psi_NM[j]) for j in range(n) if j != i) / (n - 1) for i in range(n)]
    mean = math.fsum(h_N) / n
    return [[0.0 if i == j else dot(psi_NM[i], psi_NM[j]) - h_N[i] - h_N[j] + mean for j in range(n)] for i in range(n)]


def degenerate_square(psi_NM) -> float:
    """Mean square of D over pairs: ||C||_F^2 without the signal."""
    n, d = len(psi_NM), degenerate(psi_NM)
    return math.fsum(d[i][j] ** 2 for i in range(n) for j in range(n)) / (n * (n - 1))


def closed_walks(psi_NM) -> float:
    """Mean over distinct i, j, k, l of D_ij D_jk D_kl D_li: about tr C^4."""
    d = degenerate(psi_NM)
    walks = [d[i][j] * d[j][k] * d[k][m] * d[m][i] for i, j, k, m in permutations(range(len(psi_NM)), 4)]
    return math.fsum(walks) / len(walks)


def schatten_four(psi_NM) -> float:
    """(tr C^4)^(1/4) from closed walks, not below zero, plus a standard error of what noise alone gives their mean.

    Of the 3 (n choose 4) different cycles each has a product of mean square ||C||_F^8 where all directions are alike.
    """
    spread = degenerate_square(psi_NM) ** 2 / math.sqrt(3 * math.comb(len(psi_NM), 4))
    return (max(closed_walks(psi_NM), 0.0) + spread) ** 0.25


def schatten_six(psi_NM) -> float:
    """(tr C^6)^(1/6) from closed walks over six rows in rising order, in 48 fixed orders of the rows."""
    n = len(psi_NM)
    if n < 6:
        return math.inf
    d = np.array(degenerate(psi_NM))
    sixes = np.array(list(combinations(range(n), 6)))
    by_size = sorted(range(n), key=lambda i: math.fsum(x**2 for x in d[i]))
    rng = np.random.default_rng(0)
    sums = []
    for _ in range(48):
        walk = np.array(by_size)[rng.permutation(n)][sixes]
        steps = [d[walk[:, i], walk[:, (i + 1) % 6]] for i in range(6)]
        sums.append(float(np.prod(steps, axis=0).sum()))
    spread = degenerate_square(psi_NM) ** 3 / math.sqrt(48 * len(sixes))
    return (max(math.fsum(sums) / (48 * len(sixes)), 0.0) + spread) ** (1 / 6)


def upper_estimates(psi_NM) -> list[float]:
    """Of the largest eigenvalue: the sample's own, and the Schatten norms of order 4 and 6."""
    return [float(np.linalg.eigvalsh(covariance(psi_NM))[-1]), schatten_four(psi_NM), schatten_six(psi_NM)]


def largest_eigenvalue(psi_NM) -> float:
    """The least of the three."""
    return min(upper_estimates(psi_NM))


def effective_rank(psi_NM) -> float:
    """(tr C)^2/||C||_F^2, with H2 for the latter."""
    return float(np.trace(covariance(psi_NM))) ** 2 / h2(psi_NM)


def upper_limit(psi_NM, *, quantile: float) -> float:
    """(7) unsolved: the S >= T+ at which S - T+ = q sqrt(4 S lmax/n + 2 H2/n^2), by bisection."""
    n = len(psi_NM)
    t = max(u_statistic(psi_NM), 0.0)
    largest, spread = largest_eigenvalue(psi_NM), h2(psi_NM)

    def slack(s: float) -> float:
        return s - t - quantile * math.sqrt(4 * s * largest / n + 2 * spread / n**2)

    low, high = t, t + 1.0
    while slack(high) < 0:
        high = t + 2 * (high - t)
    return bisected(slack, low, high)


def lower_limit(psi_NM, *, quantile: float) -> float:
    """The S <= T at which T - S = q sqrt(4 (v1 S/T)/n + sd0^2), by bisection; T - q sd where T is not positive.

    v1 is taken to be proportional to S: it is mu^T C mu, quadratic in the mean.
    """
    n, t = len(psi_NM), u_statistic(psi_NM)
    if t <= 0:
        return t - quantile * standard_error(psi_NM)
    linear, floor = v1(psi_NM), noise_sd(psi_NM)

    def slack(s: float) -> float:
        return quantile * math.sqrt(max(0.0, 4 * linear * (s / t) / n + floor**2)) - (t - s)

    low = t - 1.0
    while slack(low) > 0:
        low = t - 2 * (t - low)
    return bisected(slack, low, t)


def bisected(slack, low: float, high: float) -> float:
    """Where a function that is below zero at ``low`` and not at ``high`` crosses it."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if slack(middle) < 0 else (low, middle)
    return (low + high) / 2


def order_excess(psi_NM) -> float:
    """Mean over neighbours less the mean over all pairs, over the spread sqrt(H2/(n-1)) of n - 1 of them."""
    n = len(psi_NM)
    neighbours = math.fsum(dot(psi_NM[i], psi_NM[i + 1]) for i in range(n - 1)) / (n - 1)
    return (neighbours - u_statistic(psi_NM)) / math.sqrt(h2(psi_NM) / (n - 1))


def pair_products(psi_NM) -> list[tuple[int, int, float]]:
    """(i, j, H_ij) for all i != j."""
    n = len(psi_NM)
    return [(i, j, dot(psi_NM[i], psi_NM[j])) for i in range(n) for j in range(n) if i != j]


def sign_flipped(pairs, signs_N) -> float:
    """T* without its constant: the sum over i != j of e_i e_j H_ij."""
    return math.fsum(signs_N[i] * signs_N[j] * h for i, j, h in pairs)


def wild_bootstrap_p_value(psi_NM, signs_BN, *, enough: int) -> float:
    """p = (1 + #{T* >= T})/(B + 1) for given sign flips, or h/L where draw L is the h-th that reaches T.

    The early stop is that of Besag and Clifford 1991, "Sequential Monte Carlo p-values".
    """
    pairs = pair_products(psi_NM)
    observed = sign_flipped(pairs, [1.0] * len(psi_NM))
    reached = 0
    for drawn, signs in enumerate(signs_BN, start=1):
        if sign_flipped(pairs, signs) >= observed:
            reached += 1
        if reached == enough:
            return enough / drawn
    return (1 + reached) / (len(signs_BN) + 1)


def wild_bootstrap_exact(psi_NM) -> float:
    """P(T* >= T) over all sign flips, each equally likely; ties count up to rounding."""
    n, pairs = len(psi_NM), pair_products(psi_NM)
    observed = sign_flipped(pairs, [1.0] * n)
    slack = 1e-9 * abs(observed)
    flips = list(product((-1.0, 1.0), repeat=n))
    return sum(sign_flipped(pairs, signs) >= observed - slack for signs in flips) / len(flips)


def transfer(projections_N, *, train_score: float, level: float) -> tuple[float, float, float]:
    """X_n = X/sqrt(S_tr) (5) with one-sided Student limits: (value, lower, upper)."""
    n = len(projections_N)
    scaled = [x / math.sqrt(train_score) for x in projections_N]
    mean = math.fsum(scaled) / n
    sd = math.sqrt(math.fsum((x - mean) ** 2 for x in scaled) / (n - 1))
    half = float(scipy.stats.t.ppf(1 - level, n - 1)) * sd / math.sqrt(n)
    return mean, mean - half, mean + half


# --- 4.7: the covariance diagnostic ---------------------------------------------------------------


def covariance_diagnostic(g_ND) -> tuple[float, float, float]:
    """Debiased off-diagonal ratio, r_eff and mean |corr|, entry by entry.

    MATH.md leaves n and n - 1 open in the variance of an entry ("V_ij/n-type terms"). Unbiased for
    C with n - 1 is n/(n-1)^3 sum_k (w_k - mean w)^2, w_k = (g_ki - mean)(g_kj - mean): Schaefer and
    Strimmer 2005, "A shrinkage approach to large-scale covariance matrix estimation", appendix A.
    It is never negative and gives the 0.02 that MATH.md reports for n = 50, d = 64.
    """
    n, d = g_ND.shape
    cov_DD = covariance(g_ND)
    mean_D = [math.fsum(g_ND[:, a]) / n for a in range(d)]
    off_sq, correlations = 0.0, []
    for i in range(d):
        for j in range(d):
            if i == j:
                continue
            products = [(row[i] - mean_D[i]) * (row[j] - mean_D[j]) for row in g_ND]
            middle = math.fsum(products) / n
            off_sq += cov_DD[i, j] ** 2 - n / (n - 1) ** 3 * math.fsum((w - middle) ** 2 for w in products)
            correlations.append(abs(cov_DD[i, j]) / math.sqrt(cov_DD[i, i] * cov_DD[j, j]))
    off_sq = max(0.0, off_sq)
    total_sq = off_sq + math.fsum(cov_DD[i, i] ** 2 for i in range(d))
    trace = math.fsum(cov_DD[i, i] for i in range(d))
    return off_sq / total_sq, trace**2 / total_sq, sum(correlations) / len(correlations) if correlations else 0.0


# --- the frontier ---------------------------------------------------------------------------------


def frontier(points: list[tuple[str, float, float]]) -> set[tuple[str, float, float]]:
    """(trial, flops, loss) that nobody beats: less on one axis and not more on the other."""
    valid = [p for p in points if not (math.isnan(p[1]) or math.isnan(p[2]))]
    unbeaten = set()
    for mine in valid:
        beaten = False
        for other in valid:
            cheaper, better = other[1] < mine[1], other[2] < mine[2]
            dearer, worse = other[1] > mine[1], other[2] > mine[2]
            if (cheaper and not worse) or (better and not dearer):
                beaten = True
        if not beaten:
            unbeaten.add(mine)
    return unbeaten
