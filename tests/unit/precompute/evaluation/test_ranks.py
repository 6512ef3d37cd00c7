"""Ranks of targets against lists that are computed one by one, apart from the room."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import ConfigError
from cache.model.tower import Histories, Tower
from precompute.bundles.bundle import Bundle
from precompute.evaluation import freshness
from precompute.evaluation.freshness import (
    EVENTS,
    NIGHT,
    NIGHT_LESS_SEEN,
    STRATEGIES,
    ListModel,
    Targets,
    TimedLog,
    group_histories,
    keep_newest_items,
    rank_targets,
)
from tests.models import ITEMS, train_small

CUT_US = 20_000 * 86_400_000_000
K = 7


def a_log(seed=0, users=25, rows=600):
    rng = np.random.default_rng(seed)
    times = CUT_US + rng.integers(-5 * 86_400, 3 * 86_400, rows) // 900 * 900_000_000
    log = TimedLog.of(rng.integers(0, users, rows), rng.integers(0, ITEMS, rows), times)
    return log.only((log.user_numbers % 5 > 0) | (log.times_us > CUT_US))  # every fifth is new since the cut


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    return train_small(tmp_path_factory.mktemp("bundle"))


@pytest.mark.parametrize(("rows", "lists"), [(1 << 20, 4096), (50, 4096), (1 << 20, 3)])
def test_ranks_are_those_of_lists_computed_one_by_one(bundle, monkeypatch, rows, lists):
    monkeypatch.setattr(freshness, "CHUNK_ROWS_MAX", rows)
    monkeypatch.setattr(freshness, "CHUNK_LISTS_MAX", lists)
    log = a_log()
    targets = Targets.of(log, CUT_US, STRATEGIES, 100, np.random.default_rng(0))
    popularity = np.random.default_rng(1).permutation(ITEMS)
    model = ListModel.of(bundle, popularity, history_limit=6)
    tower = Tower.open(bundle.user_tower.path, bundle.user_tower.spec)
    vectors = Tower.open(bundle.item_tower.path, bundle.item_tower.spec).run({"item_index": np.arange(ITEMS)})

    for strategy in STRATEGIES:
        ranked_targets = rank_targets(model, log, targets, strategy, K)
        for row in range(len(targets)):
            start, end = targets.first_rows[row], targets.end_rows_by_strategy[strategy][row]
            exclusion_end = targets.end_rows_by_strategy[EVENTS][row] if strategy is NIGHT_LESS_SEEN else end
            history = list(dict.fromkeys(log.item_indices[start:end][::-1].tolist()))[::-1][-6:]
            scores = popularity.astype(np.float64)
            if history:
                scores = (tower.run({"history": Histories.of([history])}) @ vectors.T)[0]
            scores = scores.astype(np.float64)
            scores[log.item_indices[start:exclusion_end]] = -np.inf
            top = np.argsort(-scores, kind="stable")[:K].tolist()
            item = targets.item_indices[row]
            # Scores that differ only by rounding may come in either order.
            rank = ranked_targets.target_ranks[row]
            if (item in top) != (rank >= 0):
                assert abs(scores[item] - scores[top[-1]]) < 1e-5
            elif rank >= 0:
                assert abs(scores[item] - scores[top[rank]]) < 1e-5
    assert (targets.end_rows_by_strategy[NIGHT] == targets.first_rows).any()


def test_a_list_is_computed_once_for_all_targets_it_is_answered_for(bundle):
    log = a_log()
    targets = Targets.of(log, CUT_US, STRATEGIES, 100, np.random.default_rng(0))
    model = ListModel.of(bundle, np.arange(ITEMS), history_limit=100)

    list_count_by_strategy = {
        strategy: rank_targets(model, log, targets, strategy, K).list_count for strategy in STRATEGIES
    }

    ends = set(zip(targets.first_rows, targets.end_rows_by_strategy[NIGHT], strict=True))
    assert list_count_by_strategy[NIGHT] == sum(end > start for start, end in ends) > 0
    assert (
        list_count_by_strategy[NIGHT]
        < list_count_by_strategy[NIGHT_LESS_SEEN]
        < list_count_by_strategy[EVENTS]
        <= len(targets)
    )


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=12), min_size=1, max_size=8), st.integers(1, 4))
def test_a_history_has_every_item_once_at_its_latest_position(rows, limit):
    items = np.array([item for row in rows for item in row], np.int64)
    ends = np.cumsum([len(row) for row in rows])
    owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    log = TimedLog(owners, items, np.arange(len(items)))

    full_histories = group_histories(log, ends - [len(row) for row in rows], ends)
    short = keep_newest_items(full_histories, limit)

    for number, row in enumerate(rows):
        expected = list(dict.fromkeys(row[::-1]))[::-1]
        history_span = slice(full_histories.indptr[number], full_histories.indptr[number + 1])
        assert full_histories.indices[history_span].tolist() == expected
        assert short.indices[short.indptr[number] : short.indptr[number + 1]].tolist() == expected[-limit:]


def test_a_model_that_a_log_cannot_fill_is_refused(bundle):
    class Wanting:
        name = "theirs"

        class item_tower:  # noqa: N801
            class spec:  # noqa: N801
                features = ()

        class user_tower:  # noqa: N801
            class spec:  # noqa: N801
                history = None
                features = ()

    with pytest.raises(ConfigError, match="theirs reads no history"):
        ListModel.of(Wanting, np.arange(ITEMS), 10)  # type: ignore[arg-type]
