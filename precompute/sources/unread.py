"""Files that no reader takes: why not, by their names or by their first bytes, and what to do."""

from pathlib import Path
from typing import Final

UTF_8_MARK: Final = b"\xef\xbb\xbf"
IS_UTF_16: Final = "is UTF-16: convert it to UTF-8, e.g. with iconv -f utf-16 -t utf-8"
NOT_GZIP: Final = (
    "is not compressed with gzip, as its name says: give it another name, or compress it"
)
IS_JSON: Final = "JSON is not read: write it as Parquet or CSV"
_CONVERT: Final = "write it as Parquet or CSV"
_UNPACK: Final = "this compression is not read: unpack it, or compress it with gzip"

_OF_ENDINGS: Final = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".jl", ".geojson"), IS_JSON),
    **dict.fromkeys((".orc", ".avro", ".feather", ".arrow"), f"only Parquet, CSV and lines are read: {_CONVERT}"),
    **dict.fromkeys((".xls", ".xlsx", ".xlsm", ".ods"), "spreadsheets are not read: save the sheet as CSV in UTF-8"),
    **dict.fromkeys(
        (".pkl", ".pickle", ".h5", ".hdf5", ".sqlite", ".sqlite3", ".db", ".duckdb", ".npy", ".npz", ".mat", ".rds",
         ".xml", ".html", ".yaml", ".yml", ".sql"),
        f"it is not read: {_CONVERT}",
    ),
    **dict.fromkeys(
        (".zst", ".zstd", ".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".rar", ".br", ".snappy"), _UNPACK
    ),
}  # fmt: skip
"""Ending -> why files of such names are not read, and what to do."""
_MAGIC: Final = (
    (b"PAR1\x15", "is Parquet by its first bytes: rename it to end in .parquet"),
    (b"\x1f\x8b", "is compressed with gzip by its first bytes: rename it to end in .gz, such as .csv.gz"),
    (b"\x28\xb5\x2f\xfd", "is compressed as zstd: unpack it, or compress it with gzip"),
    (b"BZh91AY&SY", "is compressed as bzip2: unpack it, or compress it with gzip"),
    (b"\xfd7zXZ\x00", "is compressed as xz: unpack it, or compress it with gzip"),
    (b"\x04\x22\x4d\x18", "is compressed as lz4: unpack it, or compress it with gzip"),
    (b"PK\x03\x04", "is an archive or a spreadsheet by its first bytes: unpack it, or save the sheet as CSV in UTF-8"),
    (b"ARROW1\x00", f"is an Arrow file by its first bytes: {_CONVERT}"),
    (b"Obj\x01", f"is Avro by its first bytes: {_CONVERT}"),
    (b"SQLite format 3\x00", f"is an SQLite database by its first bytes: {_CONVERT}"),
)  # fmt: skip
_UTF_32_MARKS: Final = (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")
_UTF_16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
_PAGE_STARTS: Final = (b"<!doctype", b"<html", b"<?xml")
_BLANKS: Final = b" \t\r\n"


def is_gzip(path: Path) -> bool:
    """True if a file begins as those do that gzip wrote."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def of_name(name: str) -> str | None:
    """Reason why files of this name are not read, None if the name does not say that."""
    base_name = name.lower().removesuffix(".gz")
    return next(
        (reason for ending, reason in _OF_ENDINGS.items() if base_name.endswith(ending)), None
    )


def holds_data_unread(name: str) -> bool:
    """True if a file is one of data by its name, though it is not read: others, such as settings, may be JSON, too."""
    base_name = name.lower().removesuffix(".gz")
    if base_name.endswith((".jsonl", ".ndjson", ".jl", ".orc", ".avro", ".feather", ".arrow")):
        return True
    stem = base_name.rpartition(".")[0]
    return _OF_ENDINGS.get(f".{base_name.rpartition('.')[2]}") == _UNPACK and stem.endswith(
        (".csv", ".tsv", ".parquet", ".txt", ".json", ".jsonl", ".ndjson")
    )


def of_text(head: bytes) -> str | None:
    """Reason why a file that begins with these bytes is no table in UTF-8 as text, None if it may be one."""
    for magic, reason in _MAGIC:
        if head.startswith(magic):
            return reason
    if head.startswith(_UTF_32_MARKS):
        return "is UTF-32: convert it to UTF-8, e.g. with iconv -f utf-32 -t utf-8"
    if head.startswith(_UTF_16_MARKS):
        return IS_UTF_16
    begin = head[:4096]
    while begin.startswith(UTF_8_MARK):
        begin = begin.removeprefix(UTF_8_MARK)
    if b"\x00" in begin.partition(b"\n")[0]:
        return "has zero bytes in its first line: if it is UTF-16, convert it, e.g. with iconv -f utf-16le -t utf-8"
    start = begin.lstrip(_BLANKS)
    if start.lower().startswith(_PAGE_STARTS):
        return "is a page of HTML or XML: is it what you meant to download?"
    if (start[:1] == b"{" and start[1:].lstrip(_BLANKS)[:1] in (b'"', b"}")) or (
        start[:1] == b"[" and start[1:].lstrip(_BLANKS)[:1] in (b"{", b"[", b'"')
    ):
        return f"looks like JSON: {IS_JSON}"
    return None


def looks_like_rows(head: bytes) -> str | None:
    """Sign between the fields of text whose first lines all have it equally often, None if there is none."""
    lines = [line for line in head.split(b"\n")[:20] if line.strip()]
    if len(lines) > 2 and not head.endswith(b"\n"):
        lines.pop()
    for sign in (b"::", b"\t", b",", b";", b"|", b"\x01"):
        counts = {line.count(sign) for line in lines}
        if len(counts) == 1 and counts != {0} and (len(lines) > 1 or sign == b"\t"):
            return sign.decode()
    return None
