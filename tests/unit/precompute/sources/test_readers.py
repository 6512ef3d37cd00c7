"""What people hand over as sources: odd times, damaged files and wrong columns are read or named, never a traceback."""

import errno
import gzip
import os
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cache.errors import SourceError, StoreError
from precompute.config.settings import Sources, parse_time
from precompute.sources.files import digest_files, source_files
from precompute.sources.readers import read_features, read_interactions

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
    assert read(tmp_path, "a.parquet")[0].times_us.tolist() == [expected]


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint64(), pa.float64()])
def test_numbers_are_seconds(tmp_path, kind):
    write(tmp_path, timestamp=pa.array([0, SECONDS], kind))
    assert read(tmp_path, "a.parquet")[0].times_us.tolist() == [0, SECONDS * 10**6]


@pytest.mark.parametrize("setting", ["timestamp_column", "weight_column"])
@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_a_column_that_settings_name_must_be_there(tmp_path, setting, name):
    """A night with a misspelt column of times was one without times, and said nothing."""
    write(tmp_path, more=[1])
    (tmp_path / "a.csv").write_text("user,item\nu,i\n")

    with pytest.raises(SourceError, match=r"has no column 'order_at'; it has user, item"):
        read(tmp_path, name, **{setting: "order_at"})
    assert read(tmp_path, name)  # the defaults may lack
    assert read(tmp_path, name, **{setting: ""})


def test_dates_are_their_first_moment(tmp_path):
    for kind in (pa.date32(), pa.date64()):
        write(tmp_path, timestamp=pa.array([1], pa.int32()).cast(pa.date32()).cast(kind))
        assert read(tmp_path, "a.parquet")[0].times_us.tolist() == [86_400 * 10**6]


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
    with pytest.raises(SourceError, match=r"of a\.parquet can be used: timestamp: .*seconds since 1970"):
        read(tmp_path, "a.parquet")


def test_times_that_do_not_fit_are_refused_not_wrapped(tmp_path):
    for value in (2**62, -(2**62)):
        write(tmp_path, timestamp=pa.array([value], pa.timestamp("ms")))
        with pytest.raises(SourceError, match="timestamp: a time out of range"):
            read(tmp_path, "a.parquet")


def test_the_cut_drops_no_row_of_a_column_in_milliseconds_silently(tmp_path):
    write(tmp_path, timestamp=[SECONDS * 1000])
    with pytest.raises(SourceError, match="divide milliseconds by 1,000"):
        list(read_interactions(Sources(("*",)), tmp_path, cutoff_at=parse_time("2026-01-01")))


@pytest.mark.parametrize(
    ("name", "content", "message_pattern"),
    [
        ("a.txt", b"u1 caf\xe9\n", "not UTF-8"),
        ("a.csv", b"user,item\nu1,caf\xe9\n", "item: an id that is not UTF-8"),
        ("a.csv", b"", "cannot read"),
        ("a.csv", b"user,item\na\n", "more or fewer columns than the header .*line '2'"),
        ("a.txt.gz", gzip.compress(b"u1 i1\n" * 1000, mtime=0)[:-10], "cut off"),
        ("a.csv.gz", gzip.compress(b"user,item\n" + b"u1,i1\n" * 1000, mtime=0)[:-20], "cannot read"),
        ("a.txt.gz", gzip.compress(b"u1 i1\n", mtime=0)[:10] + b"\xff" * 20, "compressed data is damaged"),
        ("a.txt.gz", b"u1 i1\n", "not compressed with gzip, as its name says"),
        ("a.parquet", b"PAR1 and nothing else PAR1", "cannot read"),
        ("a.csv", b"user,item,weight\na,b,high\n", "weight: a weight that is no number .*weights are numbers"),
        ("a.csv", b"user,item,timestamp\na,b,2024/01/02 03:04\n", "timestamp: no time that can be read .*ISO 8601"),
        ("a.csv", b"user,item,timestamp\na,b,\nc,d,\n", "timestamp: no time .*fill them in"),
        ("a.csv", b"user,thing\na,b\n", "no column 'item'; it has user, thing"),
        ("a.what", b"", "cannot tell the format"),
        ("a.orc", b"", "only Parquet, CSV and lines are read: write it as Parquet or CSV"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_to_do(tmp_path, name, content, message_pattern):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message_pattern) as caught:
        read(tmp_path, name)
    assert name in caught.value.message


@pytest.mark.parametrize("name", ["a.txt", "a.csv"])
def test_a_disk_that_fails_is_worth_another_try(tmp_path, name):
    """The first page of a process is mapped by nobody: Linux answers a read of it with EIO."""
    (tmp_path / name).symlink_to("/proc/self/mem")

    with pytest.raises(StoreError, match=r"(?i)input/output error.*run the step again") as caught:
        read(tmp_path, name)

    assert name in caught.value.message


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOENT, errno.EMFILE])
def test_a_file_that_cannot_be_opened_now_is_worth_another_try(tmp_path, monkeypatch, number):
    (tmp_path / "a.txt").write_text("u1 i1\n")

    def fail_to_open(_path, *_mode):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", fail_to_open)
    with pytest.raises(StoreError, match=r"a\.txt now"):
        read(tmp_path, "a.txt")


def test_a_file_that_this_user_may_not_read_stays_so(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("u1 i1\n")

    def denied(_path, *_mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(SourceError, match="may this user read it"):
        read(tmp_path, "a.txt")


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
    non_utf8_ids = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"user": ["u"], "item": non_utf8_ids}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet can be used: item: an id that is not UTF-8"):
        read(tmp_path, "a.parquet")


def test_weights_may_be_any_number_or_missing(tmp_path):
    for weights in (pa.array([1, 0, None], pa.int8()), pa.array([0.5, np.nan, None])):
        write(tmp_path, weight=weights)
        assert read(tmp_path, "a.parquet")[0].item_ids.row_texts().to_pylist() == ["i0"]
    write(tmp_path, weight=pa.nulls(2))
    assert not len(read(tmp_path, "a.parquet")[0].item_ids)


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


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.csv.gz", "a.txt", "a.txt.gz"])
def test_sources_behind_a_url_are_read_as_files_of_this_host_are(tmp_path, name):
    write(tmp_path, timestamp=[SECONDS, SECONDS + 1])
    lines = "u i0 i1\n" if ".txt" in name else "user,item\nu,i0\nu,i1\n"
    if name != "a.parquet":
        text = lines.encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    remote = MemoryFileSystem()
    folder = f"/{uuid.uuid4().hex}"
    remote.pipe_file(f"{folder}/{name}", (tmp_path / name).read_bytes())
    remote.pipe_file(f"{folder}/_SUCCESS", b"")
    files = [tmp_path / name]

    for pattern in (f"memory:/{folder}/{name}", f"memory:/{folder}", f"memory:/{folder}/*"):
        remote_files = source_files((pattern,), tmp_path)
        assert digest_files(remote_files) == digest_files(files)
        batches = list(read_interactions(Sources((pattern,)), tmp_path))
        assert pairs(batches) == pairs(read(tmp_path, name)) == {("u", "i0"), ("u", "i1")}


def pairs(batches):
    return {
        pair
        for batch in batches
        for pair in zip(batch.user_ids.row_texts().to_pylist(), batch.item_ids.row_texts().to_pylist(), strict=True)
    }


def test_what_a_driver_raises_is_worth_another_try_and_shows_no_secret(tmp_path, monkeypatch):
    class Throttled(Exception):
        """As botocore's: no OSError."""

    def fails(*_arguments, **_named):
        raise Throttled("SlowDown for key=AKIA secret=hush")

    url = f"memory://{uuid.uuid4().hex}/a.csv"
    MemoryFileSystem().pipe_file(url, b"user,item\nu,i\n")
    (source_file,) = source_files((url,), tmp_path)
    monkeypatch.setattr(MemoryFileSystem, "_open", fails)

    for read_it in (lambda: digest_files([source_file]), lambda: list(read_interactions(Sources((url,)), tmp_path))):
        with pytest.raises(StoreError, match="Throttled: SlowDown") as failed:
            read_it()
        assert "hush" not in str(failed.value)


def test_a_remote_source_that_is_not_there_is_named_and_so_is_a_missing_driver(tmp_path):
    with pytest.raises(SourceError, match="no source file matches memory://none"):
        source_files((f"memory://none/{uuid.uuid4().hex}",), tmp_path)
    with pytest.raises(SourceError, match="cannot open nowhere:// sources"):
        source_files(("nowhere://user:secret@host/a.parquet",), tmp_path)


def test_batches_of_wide_features_have_fewer_rows(tmp_path, monkeypatch):
    """Half a million rows of 768 numbers are 1.6 GB."""
    wide = pa.array([[float(row)] * 64 for row in range(1000)], pa.list_(pa.float32()))
    users = [f"u{row}" for row in range(1000)]
    table = pa.table({"user": users, "taste": wide})
    pq.write_table(table, tmp_path / "users.parquet", use_dictionary=False)
    monkeypatch.setattr("precompute.sources.readers.BATCH_BYTES_MAX", 50_000)

    batches = list(read_features(tmp_path / "users.parquet", "user", ["taste"]))

    assert max(len(ids) for ids, _ in batches) <= 50_000 // (64 * 4)
    assert [name for ids, _ in batches for name in ids.row_texts().to_pylist()] == users
