"""Rows that say nothing are left out, counted by reason and named, and cost no other row anything."""

import gzip
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import SourceError
from cache.model.tower_spec import InputSpec
from precompute.config.settings import NightConfig, Sources, parse_time
from precompute.partitions.user_tables import write_feature_files
from precompute.sources.columns import text_hashes
from precompute.sources.features import demand_column_type, read_feature_values
from precompute.sources.readers import read_features, read_interactions
from precompute.sources.times import parse_time_texts
from precompute.sources.unusable import CASES_MAX, UnusableRows, ids_named_in, merge_reports

GOOD = [("u1", "i1", 1_700_000_000), ("u2", "i2", 1_700_000_100)]


def read(folder, name, unusable):
    batches = read_interactions(Sources((name,)), folder, unusable_rows=unusable)
    return [
        (user, item, int(time) // 10**6)
        for batch in batches
        for user, item, time in zip(
            batch.user_ids.row_texts().to_pylist(), batch.item_ids.row_texts().to_pylist(), batch.times_us, strict=True
        )
    ]


def reasons(unusable, source="interactions"):
    report = unusable.to_json()[source]
    assert report["left_out"] == sum(reason_report["rows"] for reason_report in report["reasons"].values())
    return {reason: reason_report["rows"] for reason, reason_report in report["reasons"].items()}


def test_a_parquet_row_that_says_nothing_costs_only_itself(tmp_path):
    users = [*(user for user, _, _ in GOOD), None, "", "x" * 257, "late", "itemless", "light"]
    pq.write_table(
        pa.table({
            "user": users,
            "item": ["i1", "i2", "i3", "i4", "i5", "i6", None, "i8"],
            "timestamp": pa.array([*(at for _, _, at in GOOD), 1, 1, 1, np.nan, 1, 1], pa.float64()),
            "weight": [1, 1, 1, 1, 1, 1, 1, np.inf],
        }),
        tmp_path / "a.parquet",
    )  # fmt: skip
    unusable = UnusableRows()
    assert read(tmp_path, "a.parquet", unusable) == GOOD
    assert reasons(unusable) == {
        "user: no id": 1,
        "user: an id of 0 or more than 256 bytes": 2,
        "item: no id": 1,
        "timestamp: a time out of range": 1,
        "weight: a weight that is no number": 1,
    }
    named = unusable.to_json()["interactions"]["reasons"]["timestamp: a time out of range"]["cases"]
    assert named == [{"user": "late", "item": "i6", "file": "a.parquet"}]


def test_a_csv_row_that_says_nothing_costs_only_itself(tmp_path):
    rows = [b"user,item,timestamp,weight,note"]
    rows += [b"%s,%s,%d,1,ok" % (user.encode(), item.encode(), at) for user, item, at in GOOD]
    rows += [b"short,row", b",i3,1,1,", b"caf\xe9,i4,1,1,", b"u5,i5,noon,1,", b"u6,i6,,1,"]
    rows += [b"u7,i7,2026-02-30,1,", b"u8,i8,1,heavy,", b"u9,i9,1,-inf,caf\xe9", b"ua,ia,1,,"]
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"\n".join(rows) + b"\n"))
    unusable = UnusableRows()
    assert read(tmp_path, "a.csv.gz", unusable) == GOOD
    assert reasons(unusable) == {
        "more or fewer columns than the header": 1,
        "user: an id of 0 or more than 256 bytes": 1,
        "user: an id that is not UTF-8": 1,
        "timestamp: no time that can be read": 2,
        "timestamp: no time": 1,
        "weight: a weight that is no number": 2,
    }
    assert unusable.to_json()["interactions"]["rows"] == len(rows) - 1


def test_a_line_that_is_not_utf_8_costs_only_itself(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"u1 i1 caf\xe9\n" + b"x" * 300 + b" i1 i2\nu2 i2\n")
    unusable = UnusableRows()
    assert [row[:2] for row in read(tmp_path, "a.txt", unusable)] == [("u1", "i1"), ("u2", "i2")]
    assert reasons(unusable) == {"item: an id that is not UTF-8": 1, "user: an id of 0 or more than 256 bytes": 2}


def test_rows_of_a_feature_table_without_an_id_are_left_out(tmp_path):
    pq.write_table(pa.table({"user": ["a", None, "b"], "age": [1, 2, 3]}), tmp_path / "u.parquet")
    unusable = UnusableRows()
    ((ids, values),) = read_features(tmp_path / "u.parquet", "user", ["age"], unusable_rows=unusable)
    assert (ids.row_texts().to_pylist(), values["age"].to_pylist()) == (["a", "b"], [1, 3])
    assert reasons(unusable, "features") == {"user: no id": 1}


def test_a_source_of_which_no_row_can_be_used_is_refused_with_what_to_do(tmp_path):
    milliseconds = [at * 1000 for _, _, at in GOOD]
    pq.write_table(
        pa.table({"user": ["a", "b"], "item": ["c", "d"], "timestamp": milliseconds}), tmp_path / "a.parquet"
    )
    with pytest.raises(SourceError, match=r"none of the 2 rows of a\.parquet .*divide milliseconds"):
        read(tmp_path, "a.parquet", UnusableRows())


def test_cases_are_few_and_name_no_erased_user():
    unusable = UnusableRows(hidden_ids=[b"gone"])
    unusable.count_checked("interactions", 100)
    unusable.note("interactions", "no id", 50, ({"user": f"u{row}"} for row in range(50)))
    unusable.note("interactions", "no time", 2, [{"user": "gone"}, {"user": "here"}])
    report = unusable.to_json()
    assert len(report["interactions"]["reasons"]["no id"]["cases"]) == CASES_MAX
    assert report["interactions"]["left_out"] == 52
    assert "here" in ids_named_in(report) and "gone" not in ids_named_in(report)
    twice = merge_reports([report, report])["interactions"]
    assert (twice["rows"], twice["left_out"]) == (200, 104)


@given(st.datetimes(min_value=parse_time("1900-01-02").replace(tzinfo=None),
                    max_value=parse_time("2199-12-31").replace(tzinfo=None)),
       st.sampled_from(["", "Z", "+02:00", "-0330", "+05"]), st.sampled_from(["T", " "]))  # fmt: skip
def test_texts_are_read_as_the_times_that_python_reads(moment, zone, between):
    text = moment.isoformat(between) + zone
    expected_us = round(parse_time(text).timestamp() * 10**6)
    for other_texts in ([], ["noon", "2024-06-01", "1700000000.5"]):
        times_us, readable, missing = parse_time_texts(pa.array([text, *other_texts]))
        assert readable[0] and not missing.any()
        assert abs(int(times_us[0]) - expected_us) <= 200  # of a float of seconds
    assert times_us.tolist()[2:] == [1_717_200_000_000_000, 1_700_000_000_500_000]
    assert readable.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    "text",
    ["noon", "2024-13-01", "2023-02-29", "2024-01-01T24:00", "2024-01-01T10:61", "9999-01-01",
     "2024/01/02", "-5", "1e300", "inf", "\u0662\u0660\u0662\u0664-01-01"],
)  # fmt: skip
def test_texts_that_are_no_time_are_unreadable_but_not_missing(text):
    for other_texts in ([], ["2024-01-01T00:00:00.123456789Z"]):
        _, readable, missing = parse_time_texts(pa.array([text, *other_texts]))
        assert readable.tolist() == [False, *[True] * len(other_texts)] and not missing.any()


def test_values_that_an_input_cannot_hold_cost_only_their_rows():
    narrow = InputSpec("x", "feature", "int32", column="age")
    feature_values = read_feature_values(pa.array([1, 2**40, None]), narrow)
    assert feature_values.usable_mask.tolist() == [True, False, False]
    assert feature_values.missing_mask.tolist() == [False, False, True] and list(
        feature_values.unusable_mask_by_reason
    ) == ["age: too large for int32"]
    wide = InputSpec("x", "feature", "float32", column="taste", width=2)
    rows = [[1.0, 2.0], [1.0], [1.0, None], [1.0, float("nan")], None, [3.0, 4.0]]
    feature_values = read_feature_values(pa.array(rows), wide)
    assert feature_values.usable_mask.tolist() == [True, False, False, False, False, True]
    assert feature_values.input_numbers[[0, 5]].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert set(feature_values.unusable_mask_by_reason) == {
        "taste: not of width 2", "taste: a null in a list", "taste: not finite as float32",
    }  # fmt: skip
    texts = InputSpec("x", "feature", "string", column="land")
    feature_values = read_feature_values(pa.array([b"de", b"\xff", None]).view(pa.string()), texts)
    assert feature_values.input_numbers.tolist() == ["de", "", ""] and feature_values.usable_mask.tolist() == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("kind", "dtype", "width"),
    [
        (pa.string(), "int64", None), (pa.float32(), "int32", None), (pa.int64(), "string", None),
        (pa.null(), "float32", None), (pa.list_(pa.float32()), "float32", None),
        (pa.float32(), "float32", 2), (pa.list_(pa.float32(), 3), "float32", 2),
        (pa.list_(pa.string()), "float32", 2),
    ],
)  # fmt: skip
def test_a_column_that_no_row_can_be_read_from_is_refused_by_name(kind, dtype, width):
    spec = InputSpec("x", "feature", dtype, column="age", width=width)
    with pytest.raises(SourceError, match=r"column 'age' is .* the model's input 'x' takes"):
        demand_column_type(kind, spec, "users.parquet")


def test_a_row_is_counted_once_however_many_models_take_its_column(tmp_path):
    # Given two inputs that use one column of texts, where one of four texts is too long, and one column of numbers
    texts, numbers = ["a" * 5_000, "b", "c", "d"], [1.0, 2.0, np.nan, 4.0]
    table = {"user": ["u1", "u2", "u3", "u4"], "text": texts, "number": numbers}
    pq.write_table(pa.table(table), tmp_path / "users.parquet")
    age = InputSpec("number", "feature", "float32", column="number")
    inputs = [
        InputSpec("text", "feature", "string", column="text"),
        InputSpec("topic", "feature", "string", column="text"),
        age, age, replace(age, name="age"),
    ]  # fmt: skip
    config = NightConfig(
        base=str(tmp_path), sources=Sources(user_features="users.parquet"), feature_text_bytes=4_096, shards=1
    )
    unusable = UnusableRows()
    (tmp_path / "parts").mkdir()

    write_feature_files(
        config, tmp_path / "parts", lambda ids: text_hashes(ids.row_texts(), 1), ["number", "text"], inputs,
        unusable,
    )  # fmt: skip

    report = unusable.to_json()
    for column in ("text", "number"):
        of_column = report[f"user_features.{column}"]
        assert (of_column["rows"], of_column["left_out"]) == (4, 1)
