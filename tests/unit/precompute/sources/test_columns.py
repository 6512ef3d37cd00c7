"""Columns of ids: each id once, whoever has no row is not there, and what cannot be an id is named."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.errors import SourceError
from cache.format.ids import hash_ids
from cache.native import loader, pure
from precompute.config.settings import Sources, parse_time
from precompute.sources import columns
from precompute.sources.columns import Ids, read_ids
from precompute.sources.readers import Interactions, read_interactions

TEXTS = st.lists(st.text(min_size=1, max_size=3), max_size=30)


def check_and_get_texts(ids: Ids) -> list[str]:
    """The rows; the column holds nothing but what they need."""
    assert ids.id_codes.dtype == np.int32 and pa.types.is_string(ids.distinct_ids.type)
    assert sorted(set(ids.id_codes.tolist())) == list(range(len(ids.distinct_ids)))
    assert ids.distinct_raw_ids() == [name.encode() for name in ids.distinct_ids.to_pylist()]
    texts: list[str] = ids.row_texts().to_pylist()
    return texts


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def engine(request, monkeypatch):
    """Every test runs with what is installed, and as if it had not been built."""
    if request.param == "plain":
        monkeypatch.setattr(loader, "kernels", pure)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.sampled_from([pa.string(), pa.large_string()]), st.booleans(), st.data())
def test_a_column_is_its_rows_however_it_is_encoded(
    texts: list[str], kind: pa.DataType, encoded: bool, data: st.DataObject
) -> None:
    column = pa.array(texts, kind)
    ids = Ids.of(column.dictionary_encode() if encoded else column)
    assert check_and_get_texts(ids) == texts and len(ids) == len(texts)

    kept_mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))), bool)
    kept_ids = ids.only(kept_mask)
    assert check_and_get_texts(kept_ids) == [text for text, is_kept in zip(texts, kept_mask, strict=True) if is_kept]
    assert kept_ids.distinct_hashes(5).tolist() == hash_ids(kept_ids.distinct_raw_ids(), 5).tolist()


def test_texts_with_one_hash_stay_apart(monkeypatch):
    """A second hash tells; one that nobody can tell apart by either is a chance of 2 to the -128."""
    real = columns.native_text_hashes

    def weak(texts, seed):
        hashes = real(texts, seed)
        return hashes if hashes is None or seed else np.zeros_like(hashes)

    monkeypatch.setattr(columns, "native_text_hashes", weak)
    texts = ["a", "b", "a", "c"]
    assert check_and_get_texts(Ids.of(pa.array(texts))) == texts
    assert check_and_get_texts(Ids.of(pa.array(["a", "a"]))) == ["a", "a"]


def test_long_texts_and_slices_are_distinguished_too():
    texts = ["x" * 200, "y", "x" * 200, "x" * 199, "é"]
    ids = Ids.of(pa.array(texts).slice(1))
    assert check_and_get_texts(ids) == texts[1:]
    assert ids.distinct_hashes(9).tolist() == hash_ids(ids.distinct_raw_ids(), 9).tolist()


def test_a_name_without_a_row_is_not_there():
    column = pa.DictionaryArray.from_arrays(pa.array([2, 0, 2], pa.int8()), pa.array(["a", "x" * 300, "c", ""]))
    assert check_and_get_texts(read_ids(column, Path("a"), "user")[0]) == ["c", "a", "c"]


def test_numbers_in_a_dictionary_become_decimal():
    assert check_and_get_texts(Ids.of(pa.array([7, -1, 7]).dictionary_encode())) == ["7", "-1", "7"]


@pytest.mark.parametrize(
    ("column", "message_pattern"),
    [
        (pa.array([b"a"]).dictionary_encode(), "is binary; ids are strings.*as strings"),
        (pa.array([1.5]).dictionary_encode(), "is double; ids are strings.*as Int64"),
        (pa.DictionaryArray.from_arrays(pa.array([0, 5]), pa.array(["a"]), safe=False), "out of bounds"),
    ],
)
def test_a_column_that_holds_no_ids_is_refused_by_name(column, message_pattern):
    with pytest.raises(SourceError, match=message_pattern) as refused:
        read_ids(column, Path("clicks.parquet"), "who")
    assert "clicks.parquet" in str(refused.value) and "who" in str(refused.value)


@pytest.mark.parametrize(
    ("column", "rows", "expected_reason"),
    [
        (pa.array([None, "a"]), [0], "who: no id"),
        (pa.array([None, "a"]).dictionary_encode(), [0], "who: no id"),
        (pa.nulls(2), [0, 1], "who: no id"),
        (pa.array([None, 7]), [0], "who: no id"),
        (pa.DictionaryArray.from_arrays(pa.array([0, 1, 1]), pa.array(["a", None])), [1, 2], "who: no id"),
        (pa.array([b"a", b"\xff"]).view(pa.string()), [1], "who: an id that is not UTF-8"),
        (pa.array([b"\xed\xa0\x80", b"\xc3\xa9"]).view(pa.string()), [0], "not UTF-8"),
        (pa.array(["a", "", "x" * 257], pa.large_string()), [1, 2], "of 0 or more than 256"),
        (pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array(["", "a"])), [1], "of 0 or more than 256"),
    ],
)
def test_rows_without_a_usable_id_are_separated(column, rows, expected_reason):
    ids, mask_by_reason = read_ids(column, Path("clicks.parquet"), "who")
    ((reason, mask),) = mask_by_reason.items()
    assert expected_reason in reason and np.flatnonzero(mask).tolist() == rows
    good = [row for row in range(len(column)) if row not in rows]
    assert [ids.row_texts()[row].as_py() for row in good] == [str(column[row].as_py()) for row in good]


@pytest.mark.parametrize("page_bytes", [64, 1 << 20])
def test_who_acted_only_after_the_cut_or_with_no_weight_is_in_no_batch(tmp_path, page_bytes):
    """One dictionary serves a whole file, or ends in the middle of it: neither brings anybody in."""
    rows = 5_000
    users = [f"u{row % 700}" for row in range(rows)] + ["late", "light"]
    pq.write_table(
        pa.table({
            "user": users,
            "item": [f"i{row % 90}" for row in range(rows)] + ["late-item", "light-item"],
            "timestamp": [1] * rows + [2_000_000_000, 1],
            "weight": [1] * (rows + 1) + [0],
        }),
        tmp_path / "a.parquet",
        dictionary_pagesize_limit=page_bytes,
    )  # fmt: skip
    late_batches: list[Interactions] = []
    batches = list(
        read_interactions(
            Sources(interactions=("a.parquet",)), tmp_path,
            cutoff_at=parse_time("2026-01-01"), take_late=late_batches.append,
        )
    )  # fmt: skip
    assert [text for batch in batches for text in check_and_get_texts(batch.user_ids)] == users[:rows]
    assert not {"late-item", "light-item"} & {
        name for batch in batches for name in batch.item_ids.distinct_ids.to_pylist()
    }
    assert [check_and_get_texts(batch.user_ids) + check_and_get_texts(batch.item_ids) for batch in late_batches] == [
        ["late", "late-item"]
    ]
