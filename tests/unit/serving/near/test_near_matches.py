"""Near matches over real tables: what is computed is live's own to the bit, what is reused is marked and sound."""

import gc
import weakref
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.config.serving import NearConfig
from cache.model.input_preparation import LiveInput
from cache.model.predictor import Predictor
from cache.records import Record, decode_record
from cache.store.blocklist import Blocklist
from serving.near.near_matches import NearInput, NearMatches, NearRecord, input_kind, refusal_reason
from tests.models import make_predictor, train_small
from tests.unit.serving.near.wide import ITEMS, wide_predictor

LISTS = "user_topk"
NOTHING = np.empty(0, np.int64)


@pytest.fixture(params=["exact", "approximate"])
def predictor(request: pytest.FixtureRequest) -> Predictor:
    """Its index is exact, or said not to be."""
    list_predictor = wide_predictor()
    list_predictor.search(LISTS).searcher.is_exact = request.param == "exact"
    return list_predictor


def snapshot(predictor: Predictor, blocked: tuple[int, ...] = (), version: int = 1) -> Any:
    """As much of a generation as near matches need."""
    return SimpleNamespace(
        predictor=predictor, manifest=SimpleNamespace(tables=predictor._tables), generation="g",
        blocked_item_ordinals=np.array(blocked, np.int64), blocklist_stamp=version,
        blocklist=Blocklist(version=1),  # in an arm it stays, whatever the service's own namespace blocks
    )  # fmt: skip


def drawn(count: int, seed: int = 0, length: int = 12) -> list[LiveInput]:
    """Histories, of which each is like one of few, or like none."""
    rng = np.random.default_rng(seed)
    bases = [rng.permutation(ITEMS)[:length] for _ in range(5)]
    live_inputs = []
    for number in range(count):
        history = rng.permutation(ITEMS)[:length]
        if number % 4:
            history = bases[rng.integers(len(bases))].copy()
            history[rng.integers(length)] = rng.integers(ITEMS)
        live_inputs.append(LiveInput(tuple(f"item-{item_number}".encode() for item_number in history)))
    return live_inputs


def run(near: NearMatches, at: Any, sources: list[LiveInput], *, may_reuse: bool = True) -> list[NearRecord]:
    """Records by near matches, in batches of 16."""
    near_records: list[NearRecord] = []
    for start in range(0, len(sources), 16):
        batch = [at.predictor.prepare(LISTS, live_input) for live_input in sources[start : start + 16]]
        kinds = [input_kind(live_input) if may_reuse else None for live_input in sources[start : start + 16]]
        inputs = [NearInput(prepared, 7, kind) for prepared, kind in zip(batch, kinds, strict=True)]
        near_records += near.predict(at, LISTS, inputs, 0)
    return near_records


def live(at: Any, sources: list[LiveInput]) -> list[bytes]:
    """Records by live alone."""
    batch = [at.predictor.prepare(LISTS, live_input) for live_input in sources]
    records: list[bytes] = at.predictor.predict(
        LISTS, batch, [7] * len(batch), 0, blocked_ordinals=at.blocked_item_ordinals
    )
    return records


def matches(error: float = 0.5, overlap: float = 0.1, **changes: Any) -> NearMatches:
    """Of lists, learning fast."""
    return NearMatches({LISTS: NearConfig(error, overlap, **changes)}, Random(0))


def decoded(at: Any, record: bytes) -> Record:
    return decode_record(at.manifest.tables[LISTS].layout, record)


def test_what_is_not_marked_is_lives_own_answer_to_the_bit(predictor: Predictor) -> None:
    near, at, sources = matches(), snapshot(predictor), drawn(400)

    near_records = run(near, at, sources)

    live_records = live(at, sources)
    marked = [near_record.reused_distance is not None for near_record in near_records]
    counts = near.outcome_counts_by_table[LISTS]
    assert sum(marked) == counts["reuse"] > 50 and 0 < counts["far"] < 400
    assert all(f.record == o for f, o, is_near in zip(near_records, live_records, marked, strict=True) if not is_near)
    assert sum(counts.values()) == 400


def test_an_exact_index_proves_lists_where_the_policy_trusts_nothing() -> None:
    near, at = matches(error=0.0001), snapshot(wide_predictor())
    sources = drawn(400, length=48)

    near_records = run(near, at, sources)

    assert near.outcome_counts_by_table[LISTS]["proven"] > 20 and near.outcome_counts_by_table[LISTS]["reuse"] == 0
    assert [near_record.record for near_record in near_records] == live(at, sources)
    assert {near_record.reused_distance for near_record in near_records} == {None}


def test_a_reused_list_has_its_own_scores_and_leaves_out_what_is_its_own(predictor: Predictor) -> None:
    near, sources = matches(), drawn(400)
    run(near, snapshot(predictor), sources)
    blocked = (3, 5)
    at = snapshot(predictor, blocked, version=2)
    items = predictor._items
    marked = 0
    for source, near_record in zip(sources, run(near, at, sources), strict=True):
        record = decoded(at, near_record.record)
        history_ordinals = items.ordinals_of(list(source.history or ()))
        assert (
            record.item_ordinals is not None and not np.isin(record.item_ordinals, [*history_ordinals, *blocked]).any()
        )
        if near_record.reused_distance is not None:
            marked += 1
            assert 0 <= near_record.reused_distance < 0.5
            vector = predictor.vectors([predictor.prepare(LISTS, source)])[0]  # type: ignore[list-item]
            scores = predictor.score_vector(LISTS, vector, record.item_ordinals.astype(np.int64))
            assert np.array_equal(scores, record.numbers) and (np.diff(scores) <= 0).all()
    assert marked > 50


def test_another_blocklist_forgets_the_answers_and_keeps_what_was_learned(predictor: Predictor) -> None:
    near, sources = matches(), drawn(400)
    run(near, snapshot(predictor), sources)
    trusted = near.outcome_counts_by_table[LISTS]["reuse"]

    first, *_ = run(near, snapshot(predictor, (1,), version=2), sources[:1])
    later_records = run(near, snapshot(predictor, (1,), version=2), sources[:100])
    late = run(near, snapshot(predictor, version=1), sources[:1])

    assert first.reused_distance is None and late[0].reused_distance is None
    assert trusted and any(near_record.reused_distance is not None for near_record in later_records)


def test_what_is_unblocked_by_another_namespace_is_in_proven_lists_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.model.candidate_search._BLOCKED_FILTERED_ABOVE", 2)
    near, predictor = matches(error=0.0001), wide_predictor()
    sources = drawn(400, length=48)
    item_lists = [decoded(snapshot(predictor), record).item_ordinals for record in live(snapshot(predictor), sources)]
    blocked = tuple(sorted({int(items[0]) for items in item_lists if items is not None}))[:40]
    run(near, snapshot(predictor, blocked, version=2), sources)

    at = snapshot(predictor, version=3)
    near_records = run(near, at, sources)

    assert [near_record.record for near_record in near_records] == live(at, sources)


def test_many_blocked_items_are_left_out_too(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.model.candidate_search._BLOCKED_FILTERED_ABOVE", 2)
    near, sources = matches(), drawn(300)
    at = snapshot(predictor, (1, 2, 3, 4), version=2)

    near_records = run(near, at, sources)

    for near_record in near_records:
        items = decoded(at, near_record.record).item_ordinals
        assert items is not None and not np.isin(items, [1, 2, 3, 4]).any()
    assert [near_record.record for near_record in near_records if near_record.reused_distance is None] == [
        live_record
        for live_record, near_record in zip(live(at, sources), near_records, strict=True)
        if near_record.reused_distance is None
    ]


def test_who_may_not_reuse_neither_learns_nor_reuses(predictor: Predictor) -> None:
    near, at, sources = matches(), snapshot(predictor), drawn(200)
    run(near, at, sources)
    counts_before = near.outcome_counts_by_table[LISTS].copy()

    near_records = run(near, at, sources, may_reuse=False)

    assert [near_record.record for near_record in near_records] == live(at, sources) and near.outcome_counts_by_table[
        LISTS
    ] == counts_before


def test_kinds_of_input_learn_apart() -> None:
    history, features = (b"a",), {"age": 3}

    kinds = [
        input_kind(LiveInput(history)),
        input_kind(LiveInput(None, features)),
        input_kind(LiveInput(history, features)),
    ]

    assert kinds == ["history", "features", "both"]
    assert input_kind(LiveInput(item_ordinal=3)) is None and input_kind(LiveInput()) is None


def test_what_was_learned_goes_with_its_generation() -> None:
    near, sources = matches(), drawn(64)
    for seed in range(2):
        seeded_predictor = wide_predictor(seed)
        first = run(near, snapshot(seeded_predictor), sources[:1])
        run(near, snapshot(seeded_predictor), sources)
        assert first[0].reused_distance is None and len(near._matches_by_predictor) == 1
        predictor_reference = weakref.ref(seeded_predictor)
        del seeded_predictor
        gc.collect()
        assert predictor_reference() is None and len(near._matches_by_predictor) == 0


def test_values_of_an_input_close_by_spare_the_model_and_keep_their_first_label() -> None:
    at, rng = snapshot(wide_predictor()), np.random.default_rng(0)
    near = NearMatches({"mood": NearConfig(0.1)}, Random(0))
    tower: Any = at.predictor._towers["taste"]
    layout = at.manifest.tables["mood"].layout
    marked = wrong = 0
    for _ in range(40):
        tastes = np.eye(4)[rng.integers(0, 3, 16)] + 0.01 * rng.standard_normal((16, 4))
        sources = [LiveInput(None, {"taste": tuple(taste)}) for taste in tastes.tolist()]
        batch = [at.predictor.prepare("mood", live_input) for live_input in sources]
        inputs = [NearInput(prepared, 1, input_kind(of)) for prepared, of in zip(batch, sources, strict=True)]
        ran = tower.rows
        near_records = near.predict(at, "mood", inputs, 0)
        reused = [near_record.reused_distance is not None for near_record in near_records]
        assert tower.rows - ran == 16 - sum(reused)
        labels = [int(decode_record(layout, near_record.record).numbers.argmax()) for near_record in near_records]
        true_labels = tastes[:, :3].argmax(axis=1).tolist()
        assert all(label == of for label, of, is_near in zip(labels, true_labels, reused, strict=True) if not is_near)
        marked += sum(reused)
        wrong += sum(label != of for label, of in zip(labels, true_labels, strict=True))
    assert marked == near.outcome_counts_by_table["mood"]["reuse"] > 200 and wrong == 0


@pytest.mark.parametrize(
    ("table", "expected_refusal"),
    [
        ("user_topk", None),
        ("mood", None),
        ("mixed", "more than float32 features"),
        ("single", "a single value"),
        ("nowhere", "there is no such table; the tables are mixed, mood, single, user_topk"),
    ],
)
def test_a_table_of_which_nothing_can_be_reused_says_why(
    table: str, expected_refusal: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    at, near = snapshot(wide_predictor()), NearMatches({table: NearConfig()})

    near.check(at)

    refusal_text = refusal_reason(at, table)
    assert (refusal_text is None) == (expected_refusal is None) and near.covers_table(at, table) == (
        expected_refusal is None
    )
    assert expected_refusal is None or (
        expected_refusal in str(refusal_text) and f"[serving.near.{table}]" in caplog.text
    )
    assert not near.covers_table(at, "another")


def test_without_a_model_nothing_is_reused_nor_of_a_vector(tmp_path: Path) -> None:
    at = snapshot(make_predictor(train_small(tmp_path / "bundle"), tmp_path)[0])

    assert "the vector itself" in str(refusal_reason(at, "user_vector"))
    at.predictor = None
    assert refusal_reason(at, "user_topk") == "no model computes its answers"
