"""The FAISS index of the live path."""

import tracemalloc

import numpy as np
import pytest

from cache.errors import ConfigError, CorruptArtefact
from cache.model.candidate_search import Searcher
from cache.model.ranking import unit_rows
from cache.model.tower import Histories
from precompute.bundles import agreement
from precompute.bundles import index as indexes
from precompute.bundles.index import build_index, measure_recall, sample_query_vectors


@pytest.fixture(scope="module")
def vectors():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4000, 24)) * np.exp(0.8 * rng.standard_normal((4000, 1)))
    return rows.astype(np.float32)


@pytest.mark.parametrize("kind", ["auto", "flat", "ivf", "hnsw"])
@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
def test_recall_is_measured_through_the_file_as_written(tmp_path, vectors, kind, metric):
    path = tmp_path / "index.faiss"

    report = build_index(vectors, metric, path, kind)

    # An index that is opened again gives the same recall
    reopened_recall = measure_recall(
        Searcher.open(path, metric, expected_vector_count=4000), vectors, sample_query_vectors(vectors)
    )
    assert reopened_recall == report.recall
    assert report.recall > 0.85
    assert [file.name for file in tmp_path.iterdir()] == ["index.faiss"]


def test_an_index_of_the_wrong_metric_or_probes_shows_in_its_recall(tmp_path, vectors):
    path = tmp_path / "index.faiss"
    build_index(vectors, "cosine", path, "flat")
    sample = sample_query_vectors(vectors)

    as_inner_product = measure_recall(Searcher.open(path, "inner_product"), vectors, sample)
    index = indexes.build_inverted_file(vectors, "inner_product")
    index.nprobe = 1
    one_probe = measure_recall(Searcher(index, "inner_product", 1), vectors, sample)

    assert as_inner_product < 0.8
    assert one_probe < 0.8


def test_many_items_get_the_inverted_file_only_if_it_pays(tmp_path, vectors, monkeypatch):
    monkeypatch.setattr(indexes, "FLAT_ITEMS_MAX", 1000)
    monkeypatch.setattr(indexes, "_median_search_ms", lambda searcher, sample: 1.0)

    slow = build_index(vectors, "inner_product", tmp_path / "a.faiss")
    monkeypatch.setattr(indexes, "_IVF_TIME_SHARE_MAX", 2.0)
    fast = build_index(vectors, "inner_product", tmp_path / "b.faiss")

    assert slow.index_kind == "flat"
    assert fast.index_kind.startswith("ivf")
    assert fast.recall >= 0.99


def test_a_searcher_refuses_what_is_no_index_or_another_generations(tmp_path, vectors):
    path = tmp_path / "index.faiss"
    build_index(vectors, "inner_product", path)
    (tmp_path / "broken").write_bytes(b"nothing")

    with pytest.raises(CorruptArtefact, match="4000 vectors, the generation has 5"):
        Searcher.open(path, "inner_product", expected_vector_count=5)
    with pytest.raises(CorruptArtefact, match="broken"):
        Searcher.open(tmp_path / "broken", "inner_product")


def test_candidates_do_not_depend_on_their_batch(tmp_path, vectors):
    path = tmp_path / "index.faiss"
    for kind in ("flat", "ivf"):
        build_index(vectors, "inner_product", path, kind)
        searcher = Searcher.open(path, "inner_product")

        full_batch_candidates = searcher.search(vectors[:100], 40)

        for size in (1, 7, 16, 17, 50):
            assert np.array_equal(searcher.search(vectors[:size], 40), full_batch_candidates[:size])


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_blocked_items_are_filtered_inside_the_index(tmp_path, vectors, kind):
    path = tmp_path / "index.faiss"
    build_index(vectors, "inner_product", path, kind)
    blocked = np.arange(0, 4000, 2)

    candidates = Searcher.open(path, "inner_product").search(vectors[:5], 30, blocked)

    assert (candidates % 2 == 1).all()


def test_the_candidates_wanted_depend_on_a_rows_own_exclusions():
    searcher = Searcher.__new__(Searcher)
    searcher.vector_count = 1000

    counts = searcher.candidate_counts_for(100, np.array([0, 10, 20, 100, 5000]))

    assert counts.tolist() == [132, 132, 164, 228, 1000]


def test_a_few_items_are_enough(tmp_path):
    path = tmp_path / "index.faiss"

    report = build_index(np.eye(3, dtype=np.float32), "inner_product", path)

    assert (report.index_kind, report.recall) == ("flat", 1.0)


def test_an_unknown_kind_is_refused(tmp_path, vectors):
    with pytest.raises(ConfigError, match="lsh"):
        build_index(vectors, "inner_product", tmp_path / "x", "lsh")  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
def test_an_exact_pass_holds_a_tile_of_the_items_at_a_time(metric, monkeypatch):
    """256 queries x all items as scores, ordinals and keys were 10 KB an item: 100 GB for ten million."""
    monkeypatch.setattr(indexes, "TILE_ITEMS", 1024)
    rng = np.random.default_rng(3)
    item_vectors = rng.standard_normal((20_000, 8), np.float32)
    sample = sample_query_vectors(item_vectors)[::4]

    tracemalloc.start()
    neighbours = indexes.exact_neighbours(item_vectors, sample, metric)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    item_rows, queries = (
        (unit_rows(matrix) if metric == "cosine" else matrix) for matrix in (item_vectors, sample[:4])
    )
    expected = np.argsort(-(queries @ item_rows.T), axis=1, kind="stable")[:, :100]
    assert all(set(a) == set(b) for a, b in zip(neighbours[:4], expected, strict=True))
    assert peak < 5 << 20


def test_agreement_compares_a_tile_of_the_items_at_a_time(monkeypatch):
    monkeypatch.setattr(indexes, "TILE_ITEMS", 1024)
    rng = np.random.default_rng(4)
    item_vectors = rng.standard_normal((20_000, 8), np.float32)
    exact = rng.standard_normal((64, 8), np.float32)
    close = exact + np.float32(0.01) * rng.standard_normal((64, 8), np.float32)
    scores, approximate_scores = exact[:3] @ item_vectors.T, close[:3] @ item_vectors.T
    exclusions = Histories.of([np.argsort(-scores[row])[:2] for row in range(3)] + [()] * 61)

    tracemalloc.start()
    overlap, errors = agreement._compare_tops(exact, close, item_vectors, 20, "inner_product", exclusions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    for row in range(3):
        row_exclusions = exclusions.indices[exclusions.indptr[row] : exclusions.indptr[row + 1]]
        first, second = (np.argsort(-score_matrix[row])[:22] for score_matrix in (scores, approximate_scores))
        first, second = (ordinals[~np.isin(ordinals, row_exclusions)][:20] for ordinals in (first, second))
        assert overlap[row] == len(np.intersect1d(first, second)) / 20
        error = np.abs(scores[row] - approximate_scores[row]).max() / np.abs(scores[row]).max()
        assert errors[row] == pytest.approx(error, rel=1e-5)
    assert peak < 5 << 20
