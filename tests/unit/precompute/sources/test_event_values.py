"""What events set goes into feature tables as if these had had it; what is of another kind is noted, and is none."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import CorruptArtefact, SourceError
from cache.events.event import Event
from cache.events.newer_events import VALUES_PER_ENTITY_MAX
from cache.format.manifest import EntityKind
from cache.format.stream_position import Position
from precompute.events.files import EventValues, newest_vector_by_item
from precompute.sources.columns import Ids
from precompute.sources.features import NO_ENTITY_VALUES, EntityValues, digest_of_event_values, with_event_values
from precompute.sources.unusable import UnusableRows

TYPES = {
    "age": pa.int64(), "score": pa.float32(), "home": pa.string(),
    "coded": pa.dictionary(pa.int32(), pa.string()), "taste": pa.list_(pa.float32()),
}  # fmt: skip
FITTING: dict[str, st.SearchStrategy[Any]] = {
    "age": st.integers(-9, 9), "score": st.sampled_from([0.5, 1, -2.25]), "home": st.sampled_from(["", "x", "é"]),
    "coded": st.sampled_from(["x", "y", "z"]), "taste": st.lists(st.sampled_from([0.5, 2]), max_size=2),
}  # fmt: skip
ROW = st.fixed_dictionaries({name: st.none() | strategy for name, strategy in FITTING.items()})
WANTED_ATTRIBUTES: dict[EntityKind, Collection[str]] = {"user": {"country"}, "item": {"price", "stock"}}
VALUES = st.dictionaries(
    st.sampled_from([b"a", b"b", b"c", b"d"]),
    st.fixed_dictionaries({}, optional={name: st.none() | strategy for name, strategy in FITTING.items()}),
)


def batches(ids: list[str], rows: list[dict[str, Any]], size: int) -> Any:
    for at in range(0, len(ids), size):
        batch_rows = rows[at : at + size]
        yield (
            Ids.of(pa.array(ids[at : at + size], pa.string())),
            {name: pa.array([row[name] for row in batch_rows], kind) for name, kind in TYPES.items()},
        )


def rows_of(feature_batches: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (id_, {name: column[at].as_py() for name, column in columns.items()})
        for ids, columns in feature_batches
        for at, id_ in enumerate(ids.row_texts().to_pylist())
    ]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), ROW), min_size=1, max_size=6), VALUES, st.integers(1, 4), st.booleans()
)
def test_the_table_is_the_one_with_these_values(told: Any, values: EntityValues, size: int, adds: bool) -> None:
    ids, rows = [id_and_row[0] for id_and_row in told], [id_and_row[1] for id_and_row in told]
    unusable = UnusableRows()

    feature_batches = with_event_values(
        batches(ids, rows, size), values, entity_kind="user", unusable=unusable, addable_ids=values if adds else ()
    )

    expected_rows = [(id_, row | dict(values.get(id_.encode(), {}))) for id_, row in told]
    if adds:
        empty = dict.fromkeys(TYPES)
        new = {raw: entity_values for raw, entity_values in values.items() if raw.decode() not in ids}
        expected_rows += [
            (raw.decode(), empty | dict(new[raw]))
            for raw in sorted(new)
            if any(value is not None for value in new[raw].values())
        ]
    assert rows_of(feature_batches) == expected_rows
    assert all(not source_report["reasons"] for source_report in unusable.to_json().values())


def test_the_columns_keep_their_types() -> None:
    row = {"age": 1, "score": 1.0, "home": "x", "coded": "x", "taste": [1.0]}
    values: EntityValues = {b"a": {"age": 2, "score": 2, "home": "y", "coded": "new", "taste": [3]}}

    feature_batches = with_event_values(
        batches(["a", "b"], [row, row], 2), values, entity_kind="user", unusable=UnusableRows()
    )

    ((_, columns),) = feature_batches
    assert {name: column.type for name, column in columns.items()} == TYPES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("age", "7"), ("age", 1.5), ("age", True), ("age", 2**70), ("score", "x"), ("score", False),
        ("home", 7), ("home", ["x"]), ("coded", 7), ("taste", 1.0), ("taste", ["x"]),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_noted_and_is_none(name: str, value: Any) -> None:
    row = {"age": 1, "score": 1.0, "home": "x", "coded": "x", "taste": [1.0]}
    unusable = UnusableRows()

    feature_batches = with_event_values(
        batches(["a"], [row], 1), {b"a": {name: value}}, entity_kind="item", unusable=unusable
    )

    assert rows_of(feature_batches) == [("a", row | {name: None})]
    (reason_report,) = unusable.to_json()[f"events.{name}"]["reasons"].values()
    assert reason_report == {"rows": 1, "cases": [{"item": "a"}]}


def write(path: Path, events: list[tuple[int, Event | str | None]]) -> None:
    table = {
        "position": pa.array([Position(ms, 0).number for ms, _ in events], pa.int64()),
        "event": [event.to_bytes().decode() if isinstance(event, Event) else event for _, event in events],
        "user": pa.nulls(len(events), pa.string()),
    }
    pq.write_table(pa.table(table), path)


def test_the_newest_position_counts_over_all_files(tmp_path: Path) -> None:
    first, second = tmp_path / "1.parquet", tmp_path / "2.parquet"
    write(first, [
        (1, Event("a", 0, b"u", None, attributes={"country": 1})), (2, None),
        (3, Event("b", 0, None, b"i", attributes={"price": 2.5, "stock": True})),
        (4, Event("c", 0, None, b"gone", attributes={"price": 1})),
    ])  # fmt: skip
    write(second, [
        (5, Event("d", 0, None, b"i", attributes={"price": None})),
        (6, Event("e", 0, b"gone", None, attributes={"country": 2})),
        (7, Event("f", 0, b"u", None, type="left")),
    ])  # fmt: skip

    event_values = EventValues.read([first, second], {"user": [b"gone"], "item": [b"gone"]}, WANTED_ATTRIBUTES)

    assert event_values.users == {b"u": {"country": 1}}
    assert event_values.items == {b"i": {"price": None, "stock": True}}
    assert EventValues.read([], {}, WANTED_ATTRIBUTES) == EventValues()


def test_items_that_events_bring_have_their_features_and_newest_vectors(tmp_path: Path) -> None:
    path = tmp_path / "1.parquet"
    write(path, [
        (1, Event("a", 0, None, b"new", features={"price": 2.5, "junk": 1}, attributes={"stock": True})),
        (2, Event("b", 0, None, b"gone", features={"price": 1})),
        (3, Event("c", 0, None, b"row", vector=(1.0, 2.0))),
        (4, Event("d", 0, None, b"row", vector=(3.0, 4.0))),
        (5, Event("e", 0, None, b"known", attributes={"price": 1})),
        (6, Event("f", 0, None, b"new", attributes={"price": 7})),
    ])  # fmt: skip

    event_values = EventValues.read([path], {"user": [], "item": [b"gone"]}, WANTED_ATTRIBUTES)

    assert event_values.event_item_ids == {b"new", b"row"}
    assert event_values.items == {b"new": {"price": 7, "stock": True}, b"known": {"price": 1}}
    assert newest_vector_by_item([path]) == {b"row": (3.0, 4.0)}
    assert newest_vector_by_item([]) == {}


def test_unwanted_attributes_take_no_room(tmp_path: Path) -> None:
    junk = [
        (1 + number, Event(f"{number}", 0, None, b"i", attributes={f"junk-{number}": 1, "country": 3}))
        for number in range(VALUES_PER_ENTITY_MAX + 1)
    ]  # fmt: skip
    write(tmp_path / "1.parquet", [*junk, (999, Event("x", 0, None, b"i", attributes={"price": 1}))])

    event_values = EventValues.read([tmp_path / "1.parquet"], {}, WANTED_ATTRIBUTES)

    assert event_values == EventValues({}, {b"i": {"price": 1}})


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    malformed_path, worse = tmp_path / "bad.parquet", tmp_path / "worse.parquet"
    write(malformed_path, [(1, '{"id": 7')])
    worse.write_bytes(b"PAR1")

    with pytest.raises(CorruptArtefact, match="not an event"):
        EventValues.read([malformed_path], {}, WANTED_ATTRIBUTES)
    with pytest.raises(SourceError, match=r"worse\.parquet"):
        EventValues.read([worse], {}, WANTED_ATTRIBUTES)


def test_the_digest_is_of_what_models_take_alone() -> None:
    values: EntityValues = {b"u": {"country": 1, "mood": "x"}, b"v": {"mood": "y"}}

    assert digest_of_event_values(NO_ENTITY_VALUES, ["country"]) == digest_of_event_values(values, ["age"]) == ""
    assert digest_of_event_values(values, ["country"]) == digest_of_event_values(
        {b"u": {"country": 1}}, ["country", "age"]
    )
    assert digest_of_event_values(values, ["country"]) != digest_of_event_values({b"u": {"country": None}}, ["country"])
    assert digest_of_event_values(values, ["mood"]) != digest_of_event_values({b"u": {"mood": "x"}}, ["mood"])
