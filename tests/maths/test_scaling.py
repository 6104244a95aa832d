"""The compute curve: golden numbers, and a fit that finds what made the points."""

from __future__ import annotations

import pytest

from turnwise.maths.scaling import ScalingCurve, fit


def test_golden():
    curve = ScalingCurve(0.61, 1.9, 1000, 0.1)
    assert curve(1000) == pytest.approx(0.355)
    assert curve(10000) == pytest.approx(0.60366, abs=1e-5)


CURVES = [ScalingCurve(0.61, 1.9, 1000, 0.1), ScalingCurve(0.9, 0.8, 50, 0.3), ScalingCurve(0.97, 3.0, 4000)]


@pytest.mark.parametrize("truth", CURVES)
def test_a_fit_finds_the_curve(truth):
    compute = [truth.middle * 2**k for k in range(-3, 5)]
    found = fit(compute, [truth(c) for c in compute], truth.start)
    assert found.asymptote == pytest.approx(truth.asymptote, abs=0.01)
    assert found.slope == pytest.approx(truth.slope, rel=0.05)
    assert found.middle == pytest.approx(truth.middle, rel=0.05)


def test_a_fit_without_points_is_refused():
    with pytest.raises(ValueError, match="at least 3 points"):
        fit([1, 2], [0.1, 0.2])
    with pytest.raises(ValueError, match="above the start"):
        fit([1, 2, 3], [0.1, 0.1, 0.1], start=0.1)
