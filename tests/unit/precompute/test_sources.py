"""What people hand over as sources: odd times, damaged files and wrong columns are read or named, never a traceback."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import SourceError
from precompute.config import Sources, parse_time
from precompute.sources import read_features, read_interactions, source_files

SECONDS = 1_700_000_000


def read(folder, name, **settings):
    return list(read_interactions(Sources((name,), **settings), folder))


def write(folder, **columns):
    rows = len(next(iter(columns.values())))
    ids = {"user": ["u"] * rows, "item": [f"i{row}" for row in range(rows)]}
    pq.write_table(pa.table({**ids, **columns}), folder / "a.parquet")


@pytest.mark.parametrize(
    ("unit", "value", "expected"),
    [
        ("s", SECONDS, SECONDS * 10**6),
        ("ms", SECONDS * 1000 + 7, SECONDS * 10**6 + 7000),
        ("us", SECONDS * 10**6 + 7, SECONDS * 10**6 + 7),
        ("ns", SECONDS * 10**9 + 123_456_789, SECONDS * 10**6 + 123_456),
    ],
)
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_a_timestamp_of_any_unit_becomes_microseconds(tmp_path, unit, value, expected, zone):
    write(tmp_path, timestamp=pa.array([value], pa.timestamp(unit, tz=zone)))
    assert read(tmp_path, "a.parquet")[0].times.tolist() == [expected]


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint64(), pa.float64()])
def test_numbers_are_seconds(tmp_path, kind):
    write(tmp_path, timestamp=pa.array([0, SECONDS], kind))
    assert read(tmp_path, "a.parquet")[0].times.tolist() == [0, SECONDS * 10**6]


def test_dates_are_their_first_moment(tmp_path):
    for kind in (pa.date32(), pa.date64()):
        write(tmp_path, timestamp=pa.array([1], pa.int32()).cast(pa.date32()).cast(kind))
        assert read(tmp_path, "a.parquet")[0].times.tolist() == [86_400 * 10**6]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([SECONDS * 10**3]),
        pa.array([SECONDS * 10**6]),
        pa.array([SECONDS * 10**9]),
        pa.array([2**64 - 1], pa.uint64()),
        pa.array([-1]),
        pa.array([-0.5]),
        pa.array([1e300]),
        pa.array(np.array([np.nan])),
        pa.array(np.array([np.inf])),
    ],
)
def test_numbers_that_cannot_be_seconds_say_what_is_expected(tmp_path, values):
    write(tmp_path, timestamp=values)
    with pytest.raises(
        SourceError, match=r"a\.parquet: column 'timestamp' holds .*seconds since 1970"
    ):
        read(tmp_path, "a.parquet")


def test_times_that_do_not_fit_are_refused_not_wrapped(tmp_path):
    for value in (2**62, -(2**62)):
        write(tmp_path, timestamp=pa.array([value], pa.timestamp("ms")))
        with pytest.raises(SourceError, match=r"'timestamp' holds times beyond"):
            read(tmp_path, "a.parquet")


def test_the_cut_drops_no_row_of_a_column_in_milliseconds_silently(tmp_path):
    write(tmp_path, timestamp=[SECONDS * 1000])
    with pytest.raises(SourceError, match="Divide milliseconds by 1,000"):
        list(read_interactions(Sources(("*",)), tmp_path, before=parse_time("2026-01-01")))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"u1 caf\xe9\n", "not UTF-8"),
        ("a.csv", b"user,item\nu1,caf\xe9\n", "cannot read"),
        ("a.csv", b"", "cannot read"),
        ("a.csv", b"user,item\na\n", "cannot read"),
        ("a.txt.gz", gzip.compress(b"u1 i1\n" * 1000)[:-10], "cut off"),
        ("a.csv.gz", gzip.compress(b"user,item\n" + b"u1,i1\n" * 1000)[:-20], "cannot read"),
        (
            "a.txt.gz",
            gzip.compress(b"u1 i1\n")[:10] + b"\xff" * 20,
            "compressed data is damaged",
        ),
        ("a.txt.gz", b"u1 i1\n", "compressed data is damaged"),
        ("a.parquet", b"PAR1 and nothing else PAR1", "cannot read"),
        ("a.csv", b"user,item,weight\na,b,high\n", "'weight' is string; weights are numbers"),
        ("a.csv", b"user,item,timestamp\na,b,2024/01/02 03:04\n", "'timestamp': timestamps are"),
        ("a.csv", b"user,item,timestamp\na,b,1.5\nc,d,\n", "'timestamp': 1 interactions have no"),
        ("a.csv", b"user,thing\na,b\n", "no column 'item'; it has user, thing"),
        ("a.orc", b"", "cannot tell the format"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_to_do(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=said) as caught:
        read(tmp_path, name)
    assert name in caught.value.message


def test_a_parquet_file_that_breaks_in_the_middle_is_named(tmp_path):
    write(tmp_path, timestamp=list(range(50_000)))
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[100:5000] = bytes(4900)
    (tmp_path / "a.parquet").write_bytes(raw)
    with pytest.raises(SourceError, match=r"a\.parquet"):
        read(tmp_path, "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet"):
        list(read_features(tmp_path / "a.parquet", "item", ("timestamp",)))


def test_ids_that_are_not_utf_8_are_refused_by_column(tmp_path):
    bad = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"user": ["u"], "item": bad}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet: column 'item'.*UTF-8"):
        read(tmp_path, "a.parquet")


def test_weights_may_be_any_number_or_missing(tmp_path):
    for weights in (pa.array([1, 0, None], pa.int8()), pa.array([0.5, np.nan, None])):
        write(tmp_path, weight=weights)
        assert read(tmp_path, "a.parquet")[0].items.texts().to_pylist() == ["i0"]
    write(tmp_path, weight=pa.nulls(2))
    assert not len(read(tmp_path, "a.parquet")[0].items)


def test_notes_of_other_programs_in_a_folder_are_no_sources(tmp_path):
    folder = tmp_path / "clicks"
    folder.mkdir()
    write(folder, timestamp=[1])
    for name in ("_SUCCESS", "_metadata", ".a.parquet.crc"):
        (folder / name).write_text("")
    (folder / "part=1").mkdir()
    for pattern in ("clicks", "clicks/*", "click*/a.parquet"):
        assert source_files((pattern,), tmp_path) == [folder / "a.parquet"]
        assert len(read(tmp_path, pattern)) == 1
    assert source_files(("clicks/_SUCCESS",), tmp_path) == [folder / "_SUCCESS"]


def test_a_folder_without_data_is_an_error(tmp_path):
    (tmp_path / "_SUCCESS").write_text("")
    for pattern in (".", "*"):
        with pytest.raises(SourceError, match="no source file matches"):
            source_files((pattern,), tmp_path)
