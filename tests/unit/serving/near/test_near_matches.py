"""Near matches over real tables: what is computed is live's own to the bit, what is reused is marked and sound."""

import gc
import weakref
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.config.near import NearConfig
from cache.format.records.codec import Record, decode
from cache.model.input_preparation import LiveInput
from cache.model.predictor import Predictor
from cache.store.blocklist import Blocklist
from serving.near.near_matches import NearInput, NearMatches, NearRecord, kind_of, refusal
from tests.models import make_predictor, train_small
from tests.unit.serving.near.wide import ITEMS, wide_predictor

LISTS = "user_topk"
NOTHING = np.empty(0, np.int64)


@pytest.fixture(params=["exact", "approximate"])
def predictor(request: pytest.FixtureRequest) -> Predictor:
    """Its index is exact, or said not to be."""
    found = wide_predictor()
    found.search(LISTS).searcher.is_exact = request.param == "exact"
    return found


def snapshot(predictor: Predictor, blocked: tuple[int, ...] = (), version: int = 1) -> Any:
    """As much of a generation as near matches need."""
    return SimpleNamespace(
        predictor=predictor, manifest=SimpleNamespace(tables=predictor._tables), generation="g",
        blocked_ordinals=np.array(blocked, np.int64), blocked_stamp=version,
        blocklist=Blocklist(version=1),  # in an arm it stays, whatever the service's own namespace blocks
    )  # fmt: skip


def drawn(count: int, seed: int = 0, length: int = 12) -> list[LiveInput]:
    """Histories, of which each is like one of few, or like none."""
    rng = np.random.default_rng(seed)
    bases = [rng.permutation(ITEMS)[:length] for _ in range(5)]
    found = []
    for number in range(count):
        history = rng.permutation(ITEMS)[:length]
        if number % 4:
            history = bases[rng.integers(len(bases))].copy()
            history[rng.integers(length)] = rng.integers(ITEMS)
        found.append(LiveInput(tuple(f"item-{each}".encode() for each in history)))
    return found


def run(
    near: NearMatches, at: Any, sources: list[LiveInput], *, may_reuse: bool = True
) -> list[NearRecord]:
    """Records by near matches, in batches of 16."""
    found: list[NearRecord] = []
    for start in range(0, len(sources), 16):
        batch = [at.predictor.prepare(LISTS, each) for each in sources[start : start + 16]]
        kinds = [kind_of(each) if may_reuse else None for each in sources[start : start + 16]]
        inputs = [NearInput(each, 7, kind) for each, kind in zip(batch, kinds, strict=True)]
        found += near.predict(at, LISTS, inputs, 0)
    return found


def live(at: Any, sources: list[LiveInput]) -> list[bytes]:
    """Records by live alone."""
    batch = [at.predictor.prepare(LISTS, each) for each in sources]
    found: list[bytes] = at.predictor.predict(
        LISTS, batch, [7] * len(batch), 0, blocked=at.blocked_ordinals
    )
    return found


def matches(error: float = 0.5, overlap: float = 0.1, **changes: Any) -> NearMatches:
    """Of lists, learning fast."""
    return NearMatches({LISTS: NearConfig(error, overlap, **changes)}, Random(0))


def decoded(at: Any, record: bytes) -> Record:
    return decode(at.manifest.tables[LISTS].layout, record)


def test_what_is_not_marked_is_lives_own_answer_to_the_bit(predictor: Predictor) -> None:
    near, at, sources = matches(), snapshot(predictor), drawn(400)

    found = run(near, at, sources)

    own = live(at, sources)
    marked = [each.distance is not None for each in found]
    counts = near.counts[LISTS]
    assert sum(marked) == counts["reuse"] > 50 and 0 < counts["far"] < 400
    assert all(
        f.record == o for f, o, is_near in zip(found, own, marked, strict=True) if not is_near
    )
    assert sum(counts.values()) == 400


def test_an_exact_index_proves_lists_where_the_policy_trusts_nothing() -> None:
    near, at = matches(error=0.0001), snapshot(wide_predictor())
    sources = drawn(400, length=48)

    found = run(near, at, sources)

    assert near.counts[LISTS]["proven"] > 20 and near.counts[LISTS]["reuse"] == 0
    assert [each.record for each in found] == live(at, sources)
    assert {each.distance for each in found} == {None}


def test_a_reused_list_has_its_own_scores_and_leaves_out_what_is_its_own(
    predictor: Predictor,
) -> None:
    near, sources = matches(), drawn(400)
    run(near, snapshot(predictor), sources)
    blocked = (3, 5)
    at = snapshot(predictor, blocked, version=2)
    items = predictor._items
    marked = 0
    for source, found in zip(sources, run(near, at, sources), strict=True):
        record = decoded(at, found.record)
        gone = items.ordinals_of(list(source.history or ()))
        assert record.items is not None and not np.isin(record.items, [*gone, *blocked]).any()
        if found.distance is not None:
            marked += 1
            assert 0 <= found.distance < 0.5
            vector = predictor.vectors([predictor.prepare(LISTS, source)])[0]  # type: ignore[list-item]
            scores = predictor.score_vector(LISTS, vector, record.items.astype(np.int64))
            assert np.array_equal(scores, record.numbers) and (np.diff(scores) <= 0).all()
    assert marked > 50


def test_another_blocklist_forgets_the_answers_and_keeps_what_was_learned(
    predictor: Predictor,
) -> None:
    near, sources = matches(), drawn(400)
    run(near, snapshot(predictor), sources)
    trusted = near.counts[LISTS]["reuse"]

    first, *_ = run(near, snapshot(predictor, (1,), version=2), sources[:1])
    again = run(near, snapshot(predictor, (1,), version=2), sources[:100])
    late = run(near, snapshot(predictor, version=1), sources[:1])

    assert first.distance is None and late[0].distance is None
    assert trusted and any(each.distance is not None for each in again)


def test_what_is_unblocked_by_another_namespace_is_in_proven_lists_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cache.model.candidate_search._FILTER_ABOVE", 2)
    near, predictor = matches(error=0.0001), wide_predictor()
    sources = drawn(400, length=48)
    best = [decoded(snapshot(predictor), each).items for each in live(snapshot(predictor), sources)]
    blocked = tuple(sorted({int(items[0]) for items in best if items is not None}))[:40]
    run(near, snapshot(predictor, blocked, version=2), sources)

    at = snapshot(predictor, version=3)
    found = run(near, at, sources)

    assert [each.record for each in found] == live(at, sources)


def test_many_blocked_items_are_left_out_too(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.model.candidate_search._FILTER_ABOVE", 2)
    near, sources = matches(), drawn(300)
    at = snapshot(predictor, (1, 2, 3, 4), version=2)

    found = run(near, at, sources)

    for each in found:
        items = decoded(at, each.record).items
        assert items is not None and not np.isin(items, [1, 2, 3, 4]).any()
    assert [each.record for each in found if each.distance is None] == [
        own for own, each in zip(live(at, sources), found, strict=True) if each.distance is None
    ]


def test_who_may_not_reuse_neither_learns_nor_reuses(predictor: Predictor) -> None:
    near, at, sources = matches(), snapshot(predictor), drawn(200)
    run(near, at, sources)
    before = near.counts[LISTS].copy()

    found = run(near, at, sources, may_reuse=False)

    assert [each.record for each in found] == live(at, sources) and near.counts[LISTS] == before


def test_kinds_of_input_learn_apart() -> None:
    history, features = (b"a",), {"age": 3}

    kinds = [
        kind_of(LiveInput(history)),
        kind_of(LiveInput(None, features)),
        kind_of(LiveInput(history, features)),
    ]

    assert kinds == ["history", "features", "both"]
    assert kind_of(LiveInput(item=3)) is None and kind_of(LiveInput()) is None


def test_what_was_learned_goes_with_its_generation() -> None:
    near, sources = matches(), drawn(64)
    for seed in range(2):
        found = wide_predictor(seed)
        first = run(near, snapshot(found), sources[:1])
        run(near, snapshot(found), sources)
        assert first[0].distance is None and len(near._matches) == 1
        gone = weakref.ref(found)
        del found
        gc.collect()
        assert gone() is None and len(near._matches) == 0


def test_values_of_an_input_close_by_spare_the_model_and_keep_their_first_label() -> None:
    at, rng = snapshot(wide_predictor()), np.random.default_rng(0)
    near = NearMatches({"mood": NearConfig(0.1)}, Random(0))
    tower: Any = at.predictor._towers["taste"]
    layout = at.manifest.tables["mood"].layout
    marked = wrong = 0
    for _ in range(40):
        tastes = np.eye(4)[rng.integers(0, 3, 16)] + 0.01 * rng.standard_normal((16, 4))
        sources = [LiveInput(None, {"taste": tuple(each)}) for each in tastes.tolist()]
        batch = [at.predictor.prepare("mood", each) for each in sources]
        inputs = [NearInput(each, 1, kind_of(of)) for each, of in zip(batch, sources, strict=True)]
        ran = tower.rows
        found = near.predict(at, "mood", inputs, 0)
        reused = [each.distance is not None for each in found]
        assert tower.rows - ran == 16 - sum(reused)
        labels = [int(decode(layout, each.record).numbers.argmax()) for each in found]
        own = tastes[:, :3].argmax(axis=1).tolist()
        assert all(
            label == of
            for label, of, is_near in zip(labels, own, reused, strict=True)
            if not is_near
        )
        marked += sum(reused)
        wrong += sum(label != of for label, of in zip(labels, own, strict=True))
    assert marked == near.counts["mood"]["reuse"] > 200 and wrong == 0


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("user_topk", None),
        ("mood", None),
        ("mixed", "more than float32 features"),
        ("single", "a single value"),
        ("nowhere", "there is no such table; known are mixed, mood, single, user_topk"),
    ],
)
def test_a_table_of_which_nothing_can_be_reused_says_why(
    table: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    at, near = snapshot(wide_predictor()), NearMatches({table: NearConfig()})

    near.check(at)

    why = refusal(at, table)
    assert (why is None) == (said is None) and near.covers(at, table) == (said is None)
    assert said is None or (said in str(why) and f"[serving.near.{table}]" in caplog.text)
    assert not near.covers(at, "another")


def test_without_a_model_nothing_is_reused_nor_of_a_vector(tmp_path: Path) -> None:
    at = snapshot(make_predictor(train_small(tmp_path / "bundle"), tmp_path)[0])

    assert "the vector itself" in str(refusal(at, "user_vector"))
    at.predictor = None
    assert refusal(at, "user_topk") == "no model computes its answers"
