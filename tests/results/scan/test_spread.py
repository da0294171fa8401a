import math

import numpy as np

from mhacli.results.record.corpus import QUANTILES
from mhacli.results.scan import spread as module
from mhacli.results.scan.spread import N_RESAMPLES, spreads

VALUES = np.random.default_rng(3).gamma(2.0, size=(211, 3))


def test_means_deviations_and_quantiles_are_those_of_numpy() -> None:
    for own, column in zip(spreads("entropy", VALUES), VALUES.T, strict=True):
        assert own is not None
        assert own.n == 211
        np.testing.assert_allclose([own.mean, own.std], [column.mean(), column.std(ddof=1)], rtol=1e-12)
        np.testing.assert_array_equal(own.quantiles, np.quantile(column, QUANTILES, method="inverted_cdf"))


def test_documents_without_a_value_do_not_count() -> None:
    holes = VALUES.copy()
    holes[::2, 0], holes[:, 1] = np.nan, np.nan
    first, second, third = spreads("entropy", holes)
    (alone,) = spreads("entropy", holes[1::2, :1])
    assert first is not None
    assert alone is not None
    assert second is None
    assert third == spreads("entropy", VALUES)[2]
    assert (first.n, first.mean, first.std, first.quantiles) == (alone.n, alone.mean, alone.std, alone.quantiles)


def test_the_interval_is_that_of_a_normal_mean_where_documents_are_many() -> None:
    many = np.random.default_rng(5).normal(7.0, 2.0, size=(5000, 1))
    (own,) = spreads("entropy", many)
    assert own is not None
    error = many.std() / math.sqrt(len(many))
    np.testing.assert_allclose(
        [own.low, own.high], [own.mean - 1.96 * error, own.mean + 1.96 * error], atol=0.15 * error
    )


def test_sums_of_resamples_are_those_of_whole_numbers() -> None:
    bounds = [(own.low, own.high) for own in spreads("entropy", VALUES) if own is not None]
    weights = np.concatenate([part for _, part in module._weights(len(VALUES))], axis=1).astype(int)
    assert abs(weights.mean() - 1) < 0.01
    shift = 52 - math.ceil(math.log2(4 * len(VALUES) + 64)) - math.frexp(VALUES[:, 0].max())[1]
    whole = [round(math.ldexp(value, shift)) for value in VALUES[:, 0].tolist()]
    totals = [sum(int(n) * value for n, value in zip(row, whole, strict=True)) for row in weights]
    means = sorted(math.ldexp(total, -shift) / int(row.sum()) for total, row in zip(totals, weights, strict=True))
    assert bounds[0] == (means[25], means[N_RESAMPLES - 1 - 25])


def test_one_document_has_no_deviation_and_no_interval() -> None:
    (own,) = spreads("entropy", np.array([[0.25]]))
    assert own is not None
    assert (own.mean, own.std, own.low, own.high, own.quantiles) == (0.25, None, None, None, (0.25,) * 5)
