"""What columns and lines hold: what is meant is read, what is nothing is left out, and the rest is refused by name."""

import datetime as dt
import gzip
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import SourceError
from precompute.config.settings import Sources, parse_time
from precompute.sources.columns import read_ids
from precompute.sources.readers import feature_schema, read_features, read_interactions
from precompute.sources.unusable import UnusableRows, ids_named_in

DAY_US = 86_400 * 10**6
DAY = dt.date(2023, 11, 14)
DAY_AT = int(dt.datetime(2023, 11, 14, tzinfo=dt.UTC).timestamp()) * 10**6
SECONDS = 1_700_000_000


def read(folder, *names, **settings):
    """Pairs and times of all rows, and what was left out."""
    unusable = UnusableRows()
    batches = list(read_interactions(Sources(names, **settings), folder, unusable_rows=unusable))
    pairs = [
        pair
        for batch in batches
        for pair in zip(batch.user_ids.row_texts().to_pylist(), batch.item_ids.row_texts().to_pylist(), strict=True)
    ]
    times = [time for batch in batches for time in batch.times_us.tolist()]
    return pairs, times, unusable.to_json()["interactions"]


def write(folder, name="a.parquet", **columns):
    rows = len(next(iter(columns.values())))
    ids = {"user": [f"u{row}" for row in range(rows)], "item": [f"i{row}" for row in range(rows)]}
    pq.write_table(pa.table({**ids, **columns}), folder / name)


def write_times(folder, kind, values):
    """A file of these times, in a Parquet column of a type, or as texts of a CSV file; returns its name."""
    if kind == "csv":
        rows = [f"u{row},i{row},{value}" for row, value in enumerate(values)]
        (folder / "a.csv").write_text("\n".join(["user,item,timestamp", *rows]) + "\n")
        return "a.csv"
    if kind == "text":
        write(folder, timestamp=[str(value) for value in values])
    elif kind == "codes":
        write(folder, timestamp=pa.array([str(value) for value in values]).dictionary_encode())
    elif pa.types.is_decimal(kind):
        write(folder, timestamp=pa.array([Decimal(value) for value in values], kind))
    else:
        write(folder, timestamp=pa.array(values, kind))
    return "a.parquet"


NUMBERS = ["csv", "text", "codes", pa.int64(), pa.float64(), pa.decimal128(38, 0)]


@pytest.mark.parametrize("kind", [*NUMBERS, pa.int32(), pa.uint32()])
def test_dates_as_digits_are_read_with_a_remark(tmp_path, kind):
    name = write_times(tmp_path, kind, [20231114, 20231115, 0, 20231399])
    _, times, report = read(tmp_path, name)
    assert times == [DAY_AT, DAY_AT + DAY_US]
    assert report["remarks"] == ["column 'timestamp' holds dates as yyyymmdd: they are read as UTC"]
    assert report["left_out"] == 2


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(("value", "seconds"), [(202311142213, 22 * 3600 + 13 * 60), (20231114221320, 80_000)])
def test_moments_as_digits_are_read_with_a_remark(tmp_path, kind, value, seconds):
    _, times, report = read(tmp_path, write_times(tmp_path, kind, [value]))
    assert times == [DAY_AT + seconds * 10**6] and "yyyymmddhhmm" in report["remarks"][0]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(
    ("values", "unit"),
    [([19_675, 19_676], "days"), ([45_244, 45_245, 0], "days"), ([2023], "years"), ([202311], "months")],
)
def test_numbers_that_are_no_seconds_are_refused_with_what_to_write(tmp_path, kind, values, unit):
    name = write_times(tmp_path, kind, values)
    with pytest.raises(SourceError, match=rf"a\.\w+: column 'timestamp' .*{unit} .*write dates"):
        read(tmp_path, name)


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("values", [[SECONDS, SECONDS + 1, 20231114], [20231114, SECONDS]])
def test_a_date_as_digits_among_seconds_is_no_time(tmp_path, kind, values):
    """As seconds it would be in August 1970, and its row the oldest of all."""
    _, times, report = read(tmp_path, write_times(tmp_path, kind, values))
    assert times == [value * 10**6 for value in values if value >= SECONDS]
    assert report["left_out"] == 1


def test_seconds_since_a_start_may_look_like_a_date(tmp_path):
    name = write_times(tmp_path, pa.int64(), [5_000_000, 20231114, 40_000_000])
    assert read(tmp_path, name)[1] == [5_000_000 * 10**6, 20231114 * 10**6, 40_000_000 * 10**6]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(("form", "per_second"), [("%y%m%d%H%M", 60), ("%m%d%H%M%S", 1)])
def test_moments_without_a_century_or_a_year_are_refused(tmp_path, kind, form, per_second):
    starts = [SECONDS + number * 4_001 * per_second for number in range(60)]
    texts = [dt.datetime.fromtimestamp(start, dt.UTC).strftime(form) for start in starts]
    name = write_times(tmp_path, kind, [int(text) for text in texts])
    with pytest.raises(SourceError, match=r"dates as (yymmddhhmm|mmddhhmmss) .*write dates"):
        read(tmp_path, name)


def test_seconds_of_any_hour_are_no_moments(tmp_path):
    for start in (SECONDS, 1_701_010_000):
        for step in (1, 7, 60, 3_600, 86_400):
            values = [start + number * step for number in range(100)]
            name = write_times(tmp_path, pa.int64(), values)
            assert read(tmp_path, name)[1] == [value * 10**6 for value in values]


@pytest.mark.parametrize("kind", ["csv", pa.timestamp("us")])
def test_a_time_of_the_year_1_is_out_of_range(tmp_path, kind):
    """Programs write it for none."""
    moments = [dt.datetime(1, 1, 1), dt.datetime(2023, 11, 14)]  # noqa: DTZ001
    values = [moment.isoformat() for moment in moments] if kind == "csv" else moments
    _, times, report = read(tmp_path, write_times(tmp_path, kind, values))
    assert times == [DAY_AT] and report["left_out"] == 1


@pytest.mark.parametrize("kind", ["csv", "text", "codes"])
@pytest.mark.parametrize("text", ["2023-11-14 22:13:20 UTC", "2023-11-14 22:13:20.000000 UTC"])
def test_a_time_of_bigquery_is_a_time(tmp_path, kind, text):
    assert read(tmp_path, write_times(tmp_path, kind, [text]))[1] == [SECONDS * 10**6]
    assert parse_time(text) == dt.datetime.fromtimestamp(SECONDS, dt.UTC)


def test_spark_s_times_beyond_range_are_left_out_and_counted(tmp_path):
    far, near = dt.datetime(9999, 12, 31), dt.datetime.fromtimestamp(SECONDS)  # noqa: DTZ001, DTZ006
    table = pa.table({"user": ["a", "b"], "item": ["i", "j"], "timestamp": pa.array([far, near], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    pairs, times, report = read(tmp_path, "a.parquet")
    assert pairs == [("b", "j")] and abs(times[0] - SECONDS * 10**6) <= DAY_US
    assert report["reasons"]["timestamp: a time out of range"]["rows"] == 1


def test_weights_and_times_may_be_coded_or_decimal(tmp_path):
    for weights in (
        pa.array([1.0, 0.0]).dictionary_encode(),
        pa.array(["1", "0"]).dictionary_encode(),
        pa.array(["1", "0"], pa.string_view()),
        pa.array([Decimal("1.5"), Decimal(-1)], pa.decimal256(40, 2)),
    ):
        times = pa.array([Decimal(f"{SECONDS}.25")] * 2, pa.decimal128(38, 6))
        write(tmp_path, weight=weights, timestamp=times)
        assert read(tmp_path, "a.parquet")[:2] == ([("u0", "i0")], [SECONDS * 10**6 + 250_000])


NULL_SPELLINGS = ["NULL", "null", "\\N", "nan", "NaN", "None", "NA", "N/A", "NaT", "<NA>"]


@pytest.mark.parametrize("null_spelling", NULL_SPELLINGS)
@pytest.mark.parametrize("kind", ["csv", pa.string(), pa.large_string(), pa.string_view(), "codes"])
def test_a_word_for_nothing_is_no_id(tmp_path, null_spelling, kind):
    users, items = (
        [null_spelling, "u1", "u2", "u3"],
        ["i0", null_spelling, f"x{null_spelling}", null_spelling.replace("N", "Na") + "x"],
    )
    if kind == "csv":
        rows = [f"{user},{item}" for user, item in zip(users, items, strict=True)]
        (tmp_path / "a.csv").write_text("\n".join(["user,item", *rows]) + "\n")
        name = "a.csv"
    else:
        columns = [
            pa.array(texts).dictionary_encode() if kind == "codes" else pa.array(texts, kind)
            for texts in (users, items)
        ]
        pq.write_table(pa.table(columns, ["user", "item"]), tmp_path / "a.parquet")
        name = "a.parquet"
    pairs, _, report = read(tmp_path, name)
    assert pairs == [("u2", f"x{null_spelling}"), ("u3", null_spelling.replace("N", "Na") + "x")]
    assert {reason: reason_report["rows"] for reason, reason_report in report["reasons"].items()} == {
        "user: no id": 1, "item: no id": 1,
    }  # fmt: skip


def test_a_word_for_nothing_names_no_row_of_a_feature_table(tmp_path):
    table = pa.table({"user": ["a", "NULL", None], "age": [1, 2, 3]})
    pq.write_table(table, tmp_path / "users.parquet")
    ((ids, columns),) = read_features(tmp_path / "users.parquet", "user", ["age"])
    assert ids.row_texts().to_pylist() == ["a"] and columns["age"].to_pylist() == [1]


@pytest.mark.parametrize("texts", [["42.0", "7.0"], ["1.23457E+12"], ["42.0", "", "7.0"], ["42.00"]])
@pytest.mark.parametrize("kind", ["csv", pa.string(), pa.string_view()])
def test_ids_that_a_program_made_fractions_of_are_refused_with_what_to_do(tmp_path, texts, kind):
    if kind == "csv":
        (tmp_path / "a.csv").write_text("user,item\n" + "".join(f"{text},i\n" for text in texts))
    else:
        write(tmp_path, user=pa.array(texts, kind))
    with pytest.raises(SourceError, match=r"column 'user' holds ids such as .*Int64"):
        read(tmp_path, "a.csv" if kind == "csv" else "a.parquet")


def test_versions_among_ids_are_ids(tmp_path):
    write(tmp_path, item=["4.0", "4.1", "5.2", "x"])
    pairs, _, report = read(tmp_path, "a.parquet")
    assert [item for _, item in pairs] == ["4.0", "4.1", "5.2", "x"]
    assert "remarks" not in report


def test_an_erased_id_is_no_example_of_a_remark_and_others_are_found_by_an_erasure(tmp_path):
    users = [str(row) for row in range(200)] + ["7.0", "8.0"]
    write(tmp_path, user=users, item=["i"] * 202)
    for hidden, example in (((), "8.0"), ((b"8.0",), "7.0"), ((b"7.0", b"8.0"), None)):
        unusable = UnusableRows(hidden)
        list(read_interactions(Sources(("a.parquet",)), tmp_path, unusable_rows=unusable))
        report = unusable.to_json()
        (remark,) = report["interactions"]["remarks"]
        assert "in 2 of 202 rows" in remark
        assert (repr(example) in remark) is (example is not None)
        assert ids_named_in(report) == ({example} if example else set())


def column_of_many(kind):
    values = [f"{10**20 + number}" for number in range(40_000)]
    if pa.types.is_decimal(kind):
        return values, pa.array([Decimal(value) for value in values], kind)
    return values, pa.array(values).cast(kind)


@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(), pa.large_string(), pa.decimal128(38, 0), pa.decimal128(38, 4), pa.decimal256(60, 0),
        pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int32(), pa.large_string()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_ids_of_every_type_are_texts_however_many_there_are(tmp_path, kind, use_dictionary):
    values, column = column_of_many(kind)
    table = pa.table({"user": column, "item": column})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=use_dictionary)
    assert read(tmp_path, "a.parquet")[0] == [(value, value) for value in values]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a"], pa.string_view()),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", "b"], pa.string_view())),
        pa.RunEndEncodedArray.from_arrays([1, 2, 3], ["a", "b", "a"]),
    ],
)
def test_ids_in_memory_may_be_views_or_runs(column):
    ids, mask_by_reason = read_ids(column, Path("given"), "who")
    assert ids.row_texts().to_pylist() == ["a", "b", "a"] and not mask_by_reason


@pytest.mark.parametrize(
    ("column", "message_pattern"),
    [
        (pa.array([Decimal("1.5")]), "holds fractions; ids are strings or whole numbers"),
        (pa.array([1.5]), "write the column as Int64"),
        (pa.array([["a"]]), "a row for each of a list's values: in pandas explode"),
        (pa.array([{"id": "a"}]), "the field that holds the id as a column of its own"),
        (pa.array([b"a"], pa.large_binary()), "write the column as strings"),
        (pa.array([b"a" * 16], pa.binary(16)), "write the column as strings"),
        (pa.array([True]), "is it the column of ids"),
        (pa.array([DAY]), "is it the column of ids"),
    ],
)
def test_a_type_that_holds_no_ids_is_refused_with_what_to_do(column, message_pattern):
    with pytest.raises(SourceError, match=message_pattern) as refused:
        read_ids(column, Path("clicks.parquet"), "who")
    assert "clicks.parquet" in str(refused.value) and "'who'" in str(refused.value)


def test_a_weight_with_a_comma_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "a.csv").write_text("user;item;weight\nu;i;4,5\n")
    with pytest.raises(SourceError, match="weights are numbers, with a decimal point"):
        read(tmp_path, "a.csv", separator=";")


@pytest.mark.parametrize("name", ["timestamp", "weight"])
@pytest.mark.parametrize("endings", [("csv", "csv"), ("parquet", "parquet"), ("csv", "parquet")])
@pytest.mark.parametrize("lacks", [0, 1])
def test_a_file_that_lacks_a_column_of_another_is_named(tmp_path, name, endings, lacks):
    for number, ending in enumerate(endings):
        columns = {} if number == lacks else {name: [SECONDS]}
        if ending == "parquet":
            write(tmp_path, f"{number}.parquet", user=["u"], item=["i"], **columns)
        else:
            head, row = ",".join(["user", "item", *columns]), f"u,i{f',{SECONDS}' * len(columns)}"
            (tmp_path / f"{number}.csv").write_text(f"{head}\n{row}\n")
    with pytest.raises(SourceError, match=rf"{lacks}\.\w+ has no column '{name}', but .* has: its rows"):
        read(tmp_path, "*")
    pairs, *_ = read(tmp_path, "*", **{f"{name}_column": ""})
    assert pairs == [("u", "i")] * 2


def test_a_new_file_is_held_against_those_that_a_night_does_not_read_again(tmp_path):
    write(tmp_path, "a.parquet", timestamp=[SECONDS])
    write(tmp_path, "b.parquet", weight=[1])
    with pytest.raises(SourceError, match=r"b\.parquet has no column 'timestamp', .*a\.parquet"):
        list(read_interactions(Sources(("*",)), tmp_path, skipped_file_count=1))
    assert not list(read_interactions(Sources(("*",)), tmp_path, skipped_file_count=2))


def test_lines_of_ids_have_no_times_that_another_file_has(tmp_path):
    (tmp_path / "a.txt").write_text("u1 i1 i2\n")
    write(tmp_path, "b.parquet", timestamp=[SECONDS])
    with pytest.raises(SourceError, match=r"a\.txt has no column 'timestamp'"):
        read(tmp_path, "*")


@pytest.mark.parametrize("twice", ["user", "item", "timestamp", "weight"])
def test_two_columns_of_one_name_are_refused(tmp_path, twice):
    names = ["user", "item", "timestamp", "weight", twice, "note", "note"]
    values = ["u", "i", str(SECONDS), "1", "1", "x", "y"]
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + ",".join(values) + "\n")
    pq.write_table(pa.table([[value] for value in values], names), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(SourceError, match=rf"a\.\w+ has 2 columns '{twice}'"):
            read(tmp_path, name)


def test_two_columns_of_one_name_in_a_feature_table_are_refused(tmp_path):
    path = tmp_path / "users.parquet"
    pq.write_table(pa.table([["u"], [1], [2]], ["user", "age", "age"]), path)
    with pytest.raises(SourceError, match="has 2 columns 'age'"):
        list(read_features(path, "user", ["age"]))
    with pytest.raises(SourceError, match="has 2 columns 'age'"):
        feature_schema(path, ["age"])


def test_features_may_be_views_and_codes(tmp_path):
    path = tmp_path / "users.parquet"
    table = pa.table(
        {
            "user": pa.array(["u"], pa.string_view()),
            "city": pa.array(["Rome"], pa.string_view()),
            "plan": pa.array(["free"]).dictionary_encode(),
            "tags": pa.array([["a"]], pa.list_(pa.string_view())),
        }
    )
    pq.write_table(table, path)
    names = ["city", "plan", "tags"]
    ((ids, columns),) = read_features(path, "user", names)
    assert ids.row_texts().to_pylist() == ["u"]
    assert [columns[name].to_pylist() for name in names] == [["Rome"], ["free"], [["a"]]]
    for name in names:
        assert columns[name].type == feature_schema(path).field(name).type
        assert "view" not in str(columns[name].type)


TABLES = [
    "1\t2023-11-30T07:25:45Z\t30.01\t-97.01\t22001",
    "1\ti2\tx\ty",
    "196 242 3 881250949",
    "196 242 3",
    "u196 i242 3.5",
    "u196 i242 2023-11-30 07:25:45",
    "u196,i242,3",
    "1::1193::5::978300760",
    "u|i|3",
]


@pytest.mark.parametrize("line", TABLES)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_file_of_rows_is_not_read_as_lines_of_ids(tmp_path, line, name):
    raw = f"{line}\n".encode() * 40
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    with pytest.raises(SourceError, match=r'a\.txt.* has .*fields .*format = "csv".*"lines"'):
        read(tmp_path, name)


@pytest.mark.parametrize("line", [line for line in TABLES if len(line.split()) > 1])
def test_what_settings_call_lines_are_lines(tmp_path, line):
    (tmp_path / "a.txt").write_text(f"{line}\n" * 2)
    assert len(read(tmp_path, "a.txt", format="lines")[0]) == 2 * (len(line.split()) - 1)


@pytest.mark.parametrize(
    "text", ["u1 i1 i2\nu2 i3 i4\n", "1 10\n2 20\n", "1 2 3\n4 5 6 7\n8\n", "1 2 3\n", "1\ti1\n2\ti2\n"]
)
def test_lines_of_ids_are_read(tmp_path, text):
    (tmp_path / "a.txt").write_text("\ufeff" + text)
    expected = [(fields[0], item) for line in text.splitlines() for fields in [line.split()] for item in fields[1:]]
    assert read(tmp_path, "a.txt")[0] == expected


def test_a_byte_order_mark_of_compressed_lines_is_skipped(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\ufeffu1 i1 i2\n".encode()))
    assert read(tmp_path, "a.txt.gz")[0] == [("u1", "i1"), ("u1", "i2")]


def test_numpy_is_not_asked_for_objects(tmp_path):
    """Decimals of times become numbers in one go, a million of them in no time."""
    times = pa.array(np.full(1_000, SECONDS)).cast(pa.decimal128(38, 9))
    write(tmp_path, timestamp=times)
    assert read(tmp_path, "a.parquet")[1] == [SECONDS * 10**6] * 1_000


@pytest.mark.parametrize("null_spelling", ["none", "NONE", "(none)", "#VALUE!", "-1.#IND"])
def test_further_words_for_nothing_are_no_ids(tmp_path, null_spelling):
    (tmp_path / "a.csv").write_text(f"user,item\nu1,i1\n{null_spelling},i2\nu3,{null_spelling}\n")
    pairs, _, report = read(tmp_path, "a.csv")
    assert pairs == [("u1", "i1")]
    assert {reason_text: reason["rows"] for reason_text, reason in report["reasons"].items()} == {
        "user: no id": 1,
        "item: no id": 1,
    }


def test_an_empty_id_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "a.csv").write_text("user,item\n,i1\n,i2\n")
    with pytest.raises(SourceError, match="an id has 1 to 256 bytes: fill in empty ones"):
        read(tmp_path, "a.csv")


def test_ids_with_a_comma_before_their_fraction_are_refused_with_what_to_do(tmp_path):
    rows = [f"{17850 + row},0;i{row}" for row in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["user;item", *rows]) + "\n")
    with pytest.raises(SourceError, match=r"ids such as '178\d\d,0'.*Int64"):
        read(tmp_path, "a.csv", separator=";")


@pytest.mark.parametrize("names", [("USER", "ITEM"), ("user", "item"), ("User", "Item")])
@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.txt"])
def test_a_header_again_is_no_row_in_whatever_case_and_format(tmp_path, name, names):
    pairs = [("u1", "i1"), names, ("u2", "i2"), ("user", "i3"), ("u3", "item")]
    if name == "a.parquet":
        users, items = zip(*pairs, strict=True)
        write(tmp_path, user=users, item=items)
    else:
        sign = "," if name == "a.csv" else " "
        lines = [sign.join(pair) for pair in pairs]
        header = ["user,item"] if name == "a.csv" else []
        (tmp_path / name).write_text("\n".join([*header, *lines]) + "\n")
    read_pairs, _, report = read(tmp_path, name)
    assert read_pairs == [pair for pair in pairs if pair != names]
    assert report["reasons"]["the header again"]["rows"] == 1


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["u{0}, i1, i2, i{0}"], "has ',' after its ids"),
        (["u{0}: i1 i2 i{0}"], "has ':' after the first id"),
        (["u{0} [i1 i2 i{0}]"], r"has lists that begin with '\['"),
        (["u{0} | i1 i2 i{0}"], r"has '\|' after the first id"),
        (["u{0} i1:5 i2:5 i{0}:4"], "has a value after each id"),
        (["user items", "u{0} i1 i2 i{0}"], "begins with column names, 'user items'"),
        (["user_id item_id", "u{0} i1 i2 i{0}"], "begins with column names"),
    ],
)
def test_signs_around_the_ids_of_lines_are_told(tmp_path, lines, reason):
    *titles, line = lines
    rows = [*titles, *(line.format(number) for number in range(40))]
    (tmp_path / "a.txt").write_text("\n".join(rows) + "\n")
    with pytest.raises(SourceError, match=rf"a\.txt {reason}.*remove.*format = \"lines\""):
        read(tmp_path, "a.txt")
    assert read(tmp_path, "a.txt", format="lines")[0]


def test_ids_of_lines_with_a_kind_before_a_colon_are_ids(tmp_path):
    rows = [f"u{number} film:{number} album:{number % 7}" for number in range(40)]
    (tmp_path / "a.txt").write_text("\n".join(rows) + "\n")
    assert len(read(tmp_path, "a.txt")[0]) == 80


@pytest.mark.parametrize(
    ("user", "told"),
    [
        ("\u200bu{0}", "has zero-width characters in its ids in 30 of 30 rows"),
        ("M\ufffdller{0}", "has the replacement character \ufffd in its ids in 30 of 30 rows"),
        ("\u201cu{0}\u201d", "has quotes around its ids in 30 of 30 rows"),
        ("'u{0}", "has a spreadsheet's apostrophe before its ids in 30 of 30 rows"),
        ("u\x00{0}", "has control characters, such as zero bytes, in its ids in 30 of 30 rows"),
        ("a&amp;b{0}", "has HTML or URL escapes in its ids in 30 of 30 rows"),
        ("a%20b{0}", "has HTML or URL escapes in its ids in 30 of 30 rows"),
        ("(not set)", "has the id '(not set)' in 30 of its first 30 rows"),
        ("########", "has the id '########' in 30 of its first 30 rows"),
    ],
)
def test_odd_ids_are_told(tmp_path, user, told):
    write(tmp_path, user=[user.format(row) for row in range(30)])
    (remark,) = read(tmp_path, "a.parquet")[2]["remarks"]
    assert remark.startswith(f"column 'user' {told}")


def test_blanks_that_are_part_of_ids_are_reported(tmp_path):
    write(tmp_path, item=["i1   ", "\u00a0i2", "i3"])
    _, _, report = read(tmp_path, "a.parquet")
    (remark,) = report["remarks"]
    assert remark.startswith("column 'item' has blanks around its ids in 2 of 3 rows")


@pytest.mark.parametrize("kind", ["csv", "text", pa.int64()])
def test_an_hour_as_digits_is_read_with_a_remark(tmp_path, kind):
    """As seconds these would be of the year 2034."""
    name = write_times(tmp_path, kind, [2023111422, 2023111423])
    _, times, report = read(tmp_path, name)
    assert times == [DAY_AT + 22 * 3600 * 10**6, DAY_AT + 23 * 3600 * 10**6]
    assert "dates as yyyymmddhh" in report["remarks"][0]


def test_times_whose_last_digits_a_spreadsheet_dropped_are_told(tmp_path):
    name = write_times(tmp_path, "csv", ["1.70E+09"] * 30)
    remarks = read(tmp_path, name)[2]["remarks"]
    assert remarks[0].startswith("column 'timestamp' holds numbers such as '1.70E+09', whose last")
    name = write_times(tmp_path, "csv", [f"1.7000{number:05d}e+09" for number in range(30)])
    assert "remarks" not in read(tmp_path, name)[2]


@pytest.mark.parametrize(
    ("pattern", "form"), [("%d%m%Y", "ddmmyyyy"), ("%m%d%Y", "mmddyyyy"), ("%y%m%d", "yymmdd"), ("%Y%j", "yyyyddd")]
)
@pytest.mark.parametrize("kind", ["csv", pa.int64()])
def test_digits_that_may_be_several_dates_are_refused_with_what_to_write(tmp_path, kind, pattern, form):
    days = [DAY + dt.timedelta(days=number) for number in range(30)]
    name = write_times(tmp_path, kind, [int(day.strftime(pattern)) for day in days])
    with pytest.raises(SourceError, match=rf"dates as {form} .*write dates, such as 2023-11-14"):
        read(tmp_path, name)


@pytest.mark.parametrize("first", [2_460_263, 739_205], ids=["Julian days", "days of MATLAB"])
def test_days_since_other_beginnings_are_refused(tmp_path, first):
    name = write_times(tmp_path, pa.float64(), [first + number / 24 for number in range(30)])
    with pytest.raises(SourceError, match=r"numbers of .*days.*write dates"):
        read(tmp_path, name)


@pytest.mark.parametrize("step", [1, 60, 3_600, 86_400])
def test_seconds_since_a_beginning_of_their_own_are_read(tmp_path, step):
    name = write_times(tmp_path, pa.int64(), [number * step for number in range(1, 300)])
    _, times, _ = read(tmp_path, name)
    assert times == [number * step * 10**6 for number in range(1, 300)]


def test_a_date_that_means_never_is_out_of_range_in_csv_too(tmp_path):
    name = write_times(tmp_path, "csv", ["2023-11-14", "9999-12-31", "9999-12-31 23:59:59", "soon"])
    _, _, report = read(tmp_path, name)
    assert {reason_text: reason["rows"] for reason_text, reason in report["reasons"].items()} == {
        "timestamp: a time out of range": 2,
        "timestamp: no time that can be read": 1,
    }


@pytest.mark.parametrize("text", ["# Undirected graph\nu1\ti1\n", "% matrix\nu1 i1\n"])
def test_a_comment_above_lines_is_no_line(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(SourceError, match=r"begins with a comment.*remove comments"):
        read(tmp_path, "a.txt")


@pytest.mark.parametrize(
    ("name", "content", "message_pattern"),
    [
        ("a.jsonl", b"{}", "JSON is not read: write it as Parquet or CSV"),
        ("a.csv.zst", b"", "this compression is not read: unpack it"),
        ("a.csv", b'{"user": "u1", "item": "i1"}\n', "looks like JSON"),
        ("a.txt", b'[{"user": "u1", "item": "i1"}]\n', "looks like JSON"),
        ("a.csv", gzip.compress(b"user,item\nu1,i1\n", mtime=0), r"rename it to end in \.gz"),
        ("a.csv.gz", b"user,item\nu1,i1\n", "not compressed with gzip, as its name says"),
    ],
)
def test_what_another_program_reads_is_refused_with_what_to_do(tmp_path, name, content, message_pattern):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message_pattern):
        read(tmp_path, name)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_whole_numbers_and_the_same_as_fractions_are_refused(tmp_path, kind):
    """Files that were joined, one of them with missing ids, name one user in two ways."""
    users = [f"{row}.0" if row % 4 == 0 else str(row) for row in range(80)]
    if kind == "csv":
        (tmp_path / "a.csv").write_text("user,item\n" + "".join(f"{user},i1\n" for user in users))
    else:
        write(tmp_path, user=users)
    with pytest.raises(SourceError, match=r"ids such as '\d+\.0'.*Int64"):
        read(tmp_path, f"a.{kind}")


def test_version_numbers_among_other_ids_are_ids(tmp_path):
    users = [f"{row}.0" if row % 4 == 0 else f"{row}.{row % 4}" for row in range(80)]
    (tmp_path / "a.csv").write_text("user,item\n" + "".join(f"{user},i1\n" for user in users))
    pairs, _, _ = read(tmp_path, "a.csv")
    assert len(pairs) == 80


LISTS = {"features": ("f0", "f1"), "text": ("body",)}


@pytest.mark.parametrize(
    ("first_column", "second_column", "value_type"),
    [
        (pa.array([1.5, None]), pa.array([2, 4]), pa.float64()),
        (pa.array([1, 3], pa.int8()), pa.array([True, False]), pa.int64()),
        (pa.array(["a", "c"]), pa.array(["b", None]), pa.string()),
    ],
)
def test_a_table_may_have_the_columns_of_a_list_in_its_place_in_any_order(
    first_column: Any, second_column: Any, value_type: Any, tmp_path: Path
) -> None:
    path = tmp_path / "users.parquet"
    table = {"f1": second_column, "user": ["u", "v"], "body": ["x", "y"], "f0": first_column}
    pq.write_table(pa.table(table), path)

    ((_, columns),) = read_features(path, "user", ["features", "text"], columns_of_lists=LISTS)

    schema = feature_schema(path, ["features", "text"], LISTS)
    assert schema.field("features").type == columns["features"].type == pa.list_(value_type, 2)
    pairs = zip(first_column.to_pylist(), second_column.to_pylist(), strict=True)
    assert columns["features"].to_pylist() == [list(pair) for pair in pairs]
    assert columns["text"].to_pylist() == ["x", "y"] and schema.field("text").type == pa.string()


def test_a_list_comes_before_its_columns_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "users.parquet"
    pq.write_table(pa.table({"user": ["u"], "features": [[1, 2]], "f0": [3], "f1": [4]}), path)
    ((_, columns),) = read_features(path, "user", ["features"], columns_of_lists=LISTS)
    assert columns["features"].to_pylist() == [[1, 2]]

    pq.write_table(pa.table({"user": ["u"], "f0": [3]}), path)
    with pytest.raises(SourceError, match="no column 'f1'"):
        feature_schema(path, ["features"], LISTS)
    pq.write_table(pa.table({"user": ["u"], "f2": [3]}), path)
    with pytest.raises(SourceError, match="no column 'features'"):
        list(read_features(path, "user", ["features"], columns_of_lists=LISTS))
    pq.write_table(pa.table({"user": ["u"], "f0": [3], "f1": ["x"]}), path)
    with pytest.raises(SourceError, match="f0, f1 are read as one list 'features'"):
        feature_schema(path, ["features"], LISTS)
