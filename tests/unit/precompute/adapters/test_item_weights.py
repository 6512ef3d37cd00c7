"""Item-item weights: lists of their folder are those of x B."""

import numpy as np
import pytest
import scipy.sparse as sp

from cache.errors import SourceError
from precompute.adapters import item_weights
from precompute.adapters.item_weights import ease, from_item_weights
from tests.unit.precompute.adapters.written import folded, histories_of, item_vectors, lists, ranking, taste_clicks

CLICKS = taste_clicks()
HISTORIES = histories_of(CLICKS)


def test_ease_is_what_its_paper_says():
    weights = ease(CLICKS, 50.0)

    wide = CLICKS.toarray().astype(np.float64)
    for item in (0, 17):  # the least squares of one column, the item itself left out
        other_items = np.delete(np.arange(wide.shape[1]), item)
        gram = wide[:, other_items].T @ wide[:, other_items] + 50 * np.eye(len(other_items))
        column = np.linalg.solve(gram, wide[:, other_items].T @ wide[:, item])
        np.testing.assert_allclose(weights[other_items, item], column, rtol=1e-4, atol=1e-6)
    assert not np.diag(weights).any()


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix, sp.coo_matrix])
def test_lists_are_those_of_the_weights(tmp_path, form):
    weights = ease(CLICKS, 50.0)

    report = from_item_weights(form(weights), CLICKS, to=tmp_path / "out")

    users = folded(tmp_path / "out", HISTORIES)
    exact = CLICKS.toarray().astype(np.float64) @ weights.astype(np.float64)
    assert np.array_equal(lists(tmp_path / "out", users, HISTORIES, 20), ranking(exact, HISTORIES, 20))
    np.testing.assert_allclose(users @ item_vectors(tmp_path / "out").T, exact, atol=1e-5)
    assert report.dims == report.items == 80 and report.users == 0
    assert report.agreement["overlap_at_20"] == 1.0


def test_asymmetric_weights_are_not_transposed(tmp_path):
    weights = np.random.default_rng(0).standard_normal((80, 80)).astype(np.float32)

    from_item_weights(weights, CLICKS, to=tmp_path / "out")

    exact = CLICKS.toarray() @ weights
    top_items = lists(tmp_path / "out", folded(tmp_path / "out", HISTORIES), HISTORIES, 20)
    assert np.array_equal(top_items, ranking(exact, HISTORIES, 20))


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix])
def test_weights_of_a_low_rank_are_the_same_in_as_many_dimensions(tmp_path, form):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((80, 6)) @ rng.standard_normal((6, 80))

    report = from_item_weights(form(weights), CLICKS, to=tmp_path / "out", dims=6)

    top_items = lists(tmp_path / "out", folded(tmp_path / "out", HISTORIES), HISTORIES, 20)
    assert np.array_equal(top_items, ranking(CLICKS.toarray() @ weights, HISTORIES, 20))
    assert report.dims == 6
    (limit,) = [limit for limit in report.cannot if "6 dimensions keep" in limit]
    assert "6 dimensions keep 100.0% of their squared sum" in limit
    assert "lists of 120 users share 1.000 of the exact top 20" in limit


def test_what_a_cut_costs_is_said_and_can_be_recomputed(tmp_path):
    weights = ease(CLICKS, 50.0)

    report = from_item_weights(weights, CLICKS, to=tmp_path / "out", dims=16)

    top_items = lists(tmp_path / "out", folded(tmp_path / "out", HISTORIES), HISTORIES, 20)
    exact = ranking(CLICKS.toarray() @ weights, HISTORIES, 20)
    mean_overlap = np.mean([len(np.intersect1d(*pair)) / 20 for pair in zip(top_items, exact, strict=True)])
    values = np.linalg.svd(weights, compute_uv=False) ** 2
    assert f"share {mean_overlap:.3f} of the exact top 20" in report.cannot[-1] and 0 < mean_overlap < 1
    assert f"keep {values[:16].sum() / values.sum():.1%}" in report.cannot[-1]


def test_more_items_than_are_kept_exactly_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(item_weights, "EXACT_ITEMS_MAX", 79)
    monkeypatch.setattr(item_weights, "DEFAULT_DIMS", 8)

    report = from_item_weights(ease(CLICKS), CLICKS, to=tmp_path / "out")

    assert report.dims == 8


def test_what_a_history_cannot_say_is_in_the_report(tmp_path):
    weighed = CLICKS.copy()
    weighed.data[0] = 3

    report = from_item_weights(ease(CLICKS), weighed, to=tmp_path / "out")

    assert "weigh the clicks of a history: each counts 1" in report.cannot


@pytest.mark.parametrize(
    ("weights", "more", "message_pattern"),
    [
        (np.zeros((80, 79)), {}, r"square matrix .* not \[80, 79\]"),
        (np.zeros(80), {}, "square matrix"),
        (np.full((80, 80), np.nan), {}, "not all finite: set"),
        (sp.csr_matrix(np.full((80, 80), np.inf)), {}, "not all finite: set"),
        (np.eye(81), {}, "120 by 80, there are 120 users and 81 items"),
        (np.eye(80), {"item_ids": range(79)}, "79 item ids, .* 80 items: give one id for each row"),
        (np.eye(80), {"dims": 80}, "dims must be 1 to 79, fewer than the items, not 80"),
        (np.eye(80), {"dims": 0}, "dims must be 1 to 79"),
    ],
)
def test_wrong_weights_end_in_one_line_and_nothing_written(tmp_path, weights, more, message_pattern):
    with pytest.raises(SourceError, match=message_pattern) as error:
        from_item_weights(weights, CLICKS, to=tmp_path / "out", **more)

    assert "\n" not in error.value.message and not (tmp_path / "out").exists()
