"""Rows of held-out samples: packed in half precision, added, joined, merged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from growth_service.core.score import whitener
from growth_service.probing.rows import Packed, Rows, SiteRows

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "probe_cost.py"


def draw(seed, n=6, m=500, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal((n, m))).astype(np.float32)


def test_rows_as_measured_are_kept_bit_for_bit():
    rows_NM = draw(0)
    packed = Packed.of(rows_NM, half=False)
    assert packed.numbers_NM is rows_NM
    assert np.array_equal(packed.full(), rows_NM.astype(np.float64))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_half_precision_keeps_eleven_bits_at_any_scale(scale):
    rows_NM = draw(0, scale=scale)
    packed = Packed.of(rows_NM, half=True)
    assert packed.numbers_NM.dtype == np.float16
    error = np.abs(packed.full() - rows_NM).max(axis=1) / np.abs(rows_NM).max(axis=1)
    assert (error > 0).all()
    assert (error < 2**-11).all()


def test_rows_of_zeros_stay_zeros():
    assert np.array_equal(Packed.of(np.zeros((2, 3), np.float32), half=True).full(), np.zeros((2, 3)))


@pytest.mark.parametrize("half", [False, True])
def test_rows_are_added_joined_and_merged(half):
    a_NM, b_NM = draw(1, n=3), draw(2, n=3, scale=100.0)
    a, b = Packed.of(a_NM, half=half), Packed.of(b_NM, half=half)
    near = {"rtol": 0, "atol": 2**-10 * 400 if half else 1e-4}
    np.testing.assert_allclose(a.plus(b).full(), a_NM + b_NM, **near)
    np.testing.assert_allclose(a.then(b).full(), np.concatenate([a_NM, b_NM]), **near)
    np.testing.assert_allclose(b.merged().full(), [b_NM[0] + b_NM[1], b_NM[2]], **near)
    assert {p.half for p in (a.plus(b), a.then(b), b.merged())} == {half}


def site_rows(seed):
    rng = np.random.default_rng(seed)
    return SiteRows(
        rows=Packed.of(draw(seed, n=4, m=3), half=False),
        along_N=rng.standard_normal(4),
        cross_DJ=rng.standard_normal((2, 3)).astype(np.float32),
        gradients_BD=rng.standard_normal((5, 2)).astype(np.float32),
        gradient_sq=float(seed),
        gradient_max=float(10 - seed),
    )


def test_two_looks_are_joined_and_two_parts_of_one_look_added():
    a, b = site_rows(1), site_rows(2)
    one, other = (Rows(num_samples=n, loss_sum=n / 2, sites=[s]) for n, s in ((8, a), (6, b)))
    for both, rows, along_N in (
        (one.then(other), np.concatenate([a.rows.full(), b.rows.full()]), np.concatenate([a.along_N, b.along_N])),
        (one.plus(other), a.rows.full() + b.rows.full(), a.along_N + b.along_N),
    ):
        (site,) = both.sites
        assert (both.num_samples, both.loss_sum, both.num_rows) == (14, 7.0, len(along_N))
        np.testing.assert_allclose(site.rows.full(), rows, rtol=1e-6)
        np.testing.assert_array_equal(site.along_N, along_N)
        assert site.cross_DJ.dtype == np.float64  # sums of sums are kept in double
        np.testing.assert_array_equal(site.cross_DJ, np.add(a.cross_DJ, b.cross_DJ, dtype=np.float64))
        np.testing.assert_array_equal(site.gradients_BD, np.concatenate([a.gradients_BD, b.gradients_BD]))
        assert (site.gradient_sq, site.gradient_max) == (3.0, 9.0)
    merged = one.merged()
    assert merged.num_rows == 2
    np.testing.assert_allclose(merged.sites[0].along_N, [a.along_N[:2].sum(), a.along_N[2:].sum()])


def test_a_second_moment_that_rounding_left_indefinite_is_inverted_all_the_same():
    """Sums in single precision of fewer samples than features have eigenvalues of -1e-7 of the largest."""
    sigma_KK = np.diag([1.0, 1e-3, -1e-7])
    found = whitener(sigma_KK, ridge=1e-8)
    inverse_KK = found.inv_sqrt @ found.inv_sqrt.T
    lam = found.ridge_lambda
    np.testing.assert_allclose(np.diag(inverse_KK)[:2], [1 / (1.0 + lam), 1 / (1e-3 + lam)], rtol=1e-9)
    assert np.isfinite(inverse_KK).all()


def test_a_probe_keeps_no_more_memory_than_its_matrices_and_one_batch():
    """The benchmark's own measure on a small network of many sites (its full table is in docs/signal.md)."""
    spec = {
        "family": "mlp", "input_shape": [1, 28, 28], "num_classes": 10, "widths": [64], "blocks": [15],
        "hidden": [128],
    }  # fmt: skip
    case = {"name": "residual MLP, 16 sites, d 64", "spec": spec, "samples": 4096, "batch": 512}
    code = f"import sys, json; sys.path.insert(0, {str(BENCHMARK.parent)!r}); import probe_cost as p; "
    code += f"c = p.Case(**json.loads({json.dumps(case)!r})); "
    code += "print(p.peak_mib(c, 'probe') - p.peak_mib(c, 'train'), p.allowed_mib(c))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    seen, allowed = map(float, out.stdout.split()[-2:])
    assert seen <= allowed
