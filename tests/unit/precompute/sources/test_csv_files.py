"""CSV files as others write them: every row is read, or left out and counted, or its line is named."""

import codecs
import csv
import gzip
import io
import random

import pytest

from cache.errors import ConfigError, SourceError
from precompute.config.settings import Sources
from precompute.sources.readers import read_interactions
from precompute.sources.unusable import UnusableRows

HEADER = "user,item,title,timestamp\n"
UNQUOTED = "u{0},i{0},Heat,1700000000\n"


def read(folder, *names, **settings):
    """Pairs of all rows, and what was left out."""
    unusable = UnusableRows()
    batches = read_interactions(Sources(names, **settings), folder, unusable_rows=unusable)
    pairs = [
        pair
        for batch in batches
        for pair in zip(batch.user_ids.row_texts().to_pylist(), batch.item_ids.row_texts().to_pylist(), strict=True)
    ]
    return pairs, unusable.to_json()["interactions"]


def write(folder, text, name="a.csv"):
    raw = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces so small that rows begin and end anywhere in them."""
    monkeypatch.setattr("precompute.sources.csv_files.PARSED_PIECE_BYTES", 37, raising=False)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("byte_order_mark", ["", "\ufeff"])
def test_quoted_values_are_read_as_python_reads_them(
    tmp_path, small_pieces, separator, line_break, name, byte_order_mark
):
    drawn = random.Random(7)
    signs = ["a", '"', "\n", separator, " x", '""', "\n\n", "'"]
    rows = [(f"u{n}", f'i"{n}', "".join(drawn.choices(signs, k=drawn.randrange(9))), "1700000000") for n in range(300)]
    csv_buffer = io.StringIO()
    writer = csv.writer(csv_buffer, delimiter=separator, lineterminator=line_break)
    writer.writerows([("user", "item", "title", "timestamp"), *rows])
    write(tmp_path, byte_order_mark + csv_buffer.getvalue(), name)

    pairs, report = read(tmp_path, name, separator=separator)

    assert pairs == [row[:2] for row in rows]
    assert report["left_out"] == 0


def test_a_quoted_value_may_be_longer_than_what_is_parsed_at_once(tmp_path):
    long = "line, one\n" * 600_000
    write(tmp_path, f'{HEADER}u1,i1,"{long}",1\nu2,i2,x,2\nu3,i3,"two\nlines",3\n')
    assert read(tmp_path, "a.csv")[0] == [("u1", "i1"), ("u2", "i2"), ("u3", "i3")]


@pytest.mark.parametrize("separator", [",", "\t", ";"])
@pytest.mark.parametrize(("column", "value"), [(1, '"i1'), (2, '"Heat'), (2, '"'), (3, '"1700000000'), (0, '"u1')])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_an_unclosed_quote_is_named_by_its_line(tmp_path, separator, column, value, name):
    rows = [UNQUOTED.format(number).strip().split(",") for number in range(4200)]
    rows[1000][column] = value
    lines = [separator.join(row) for row in [HEADER.strip().split(","), *rows]]
    write(tmp_path, "\n".join(lines) + "\n", name)

    with pytest.raises(SourceError, match=r'line 1002: a quote is not closed.*quote = ""'):
        read(tmp_path, name, separator=separator)


@pytest.mark.parametrize("closing", ['"Heat', 'Heat"'])
@pytest.mark.parametrize("apart", [1, 2, 400])
def test_a_quote_that_is_closed_only_rows_later_is_named_by_its_line(tmp_path, closing, apart):
    rows = [UNQUOTED.format(number) for number in range(4200)]
    rows[1000] = rows[1000].replace("Heat", '"Heat')
    rows[1000 + apart] = rows[1000 + apart].replace("Heat", closing)
    write(tmp_path, HEADER + "".join(rows))

    with pytest.raises(SourceError, match="line 1002: a quote is not closed"):
        read(tmp_path, "a.csv")


@pytest.mark.parametrize("quote", ["", False])
def test_without_quoting_every_line_is_a_row(tmp_path, quote):
    rows = [UNQUOTED.format(number) for number in range(4200)]
    rows[1000] = rows[1000].replace("Heat", '"Heat')
    write(tmp_path, HEADER + "".join(rows))
    pairs, report = read(tmp_path, "a.csv", quote=quote)
    assert len(pairs) == report["rows"] == 4200 and pairs[1000] == ("u1000", "i1000")


def test_another_quote_and_quotes_within_plain_values_are_read(tmp_path, small_pieces):
    write(tmp_path, "user,item,title\n'u,1',i1,pipe 5\" wide\nu2,i2,'it''s\nfine'\nu3,i3,5' x\n")
    assert read(tmp_path, "a.csv", quote="'")[0] == [("u,1", "i1"), ("u2", "i2"), ("u3", "i3")]


def test_malformed_lines_are_reported_by_their_number_in_the_file(tmp_path, small_pieces):
    write(tmp_path, f'{HEADER}\nu1,i1,"a\n\nb",1\nu2,i2\nu3,i3,x,1\n\nu4,i4,x,1,\n')
    pairs, report = read(tmp_path, "a.csv")
    assert pairs == [("u1", "i1"), ("u3", "i3")]
    ((reason, reason_report),) = report["reasons"].items()
    assert reason == "more or fewer columns than the header"
    assert [case["line"] for case in reason_report["cases"]] == ["6", "9"]


def test_a_separator_at_the_end_of_every_row_is_refused_with_a_remedy(tmp_path):
    write(tmp_path, "user,item\nu1,i1,\nu2,i2,\n")
    with pytest.raises(SourceError, match="a separator at its end makes one more"):
        read(tmp_path, "a.csv")


def test_an_id_with_a_line_break_is_left_out_and_counted(tmp_path):
    write(tmp_path, 'user,item,title\n"u\n1",i1,x\nu2,"i\n\n2","a\nb"\nu3,i3,x\nu4,i4,"a\n\nb"\n')
    pairs, report = read(tmp_path, "a.csv")
    assert pairs == [("u3", "i3"), ("u4", "i4")]
    assert {reason: reason_report["rows"] for reason, reason_report in report["reasons"].items()} == {
        "user: an id with a line break": 1,
        "item: an id with a line break": 1,
    }


def test_a_backslash_before_a_quote_is_refused_and_read_where_settings_name_it(tmp_path):
    write(tmp_path, 'user,item,title\nu1,i1,x\n"u\\"2",i2,"a \\"b\\", c"\nu3,\\N,x\nu4,i4,"5\\""\n')
    with pytest.raises(SourceError, match=r"line 3: a backslash is before a quote.*escape ="):
        read(tmp_path, "a.csv")
    pairs, report = read(tmp_path, "a.csv", escape="\\")
    assert pairs == [("u1", "i1"), ('u"2', "i2"), ("u4", "i4")]
    assert report["left_out"] == 1


def test_a_backslash_at_the_end_of_a_quoted_value_is_its_own(tmp_path):
    write(tmp_path, 'user,item,title\nu1,i1,"C:\\dir\\"\n"d\\u2",i2,x\n')
    assert read(tmp_path, "a.csv")[0] == [("u1", "i1"), ("d\\u2", "i2")]


@pytest.mark.parametrize(
    "text",
    [
        "user, item, timestamp\nu1, i1, 1700000000\n u2 ,\ti2 , 1700000000 \n",
        '"user", "item", "timestamp"\n"u1", "i1", 1700000000\n"u2" , "i2" , 1700000000\n',
        '\ufeff"user","item","timestamp"\r\n"u1","i1",1700000000\r\n" u2"," i2 ",1700000000\r\n',
        "\n\nuser,item,timestamp\n\nu1,i1,1700000000\n\nu2,i2,1700000000",
        "user,item,timestamp\ru1,i1,1700000000\ru2,i2,1700000000\r",
    ],
)
def test_blanks_and_marks_around_names_and_ids_are_not_theirs(tmp_path, text):
    write(tmp_path, text)
    pairs, report = read(tmp_path, "a.csv", timestamp_column="timestamp")
    assert pairs == [("u1", "i1"), ("u2", "i2")] and report["left_out"] == 0
    assert read(tmp_path, "a.csv", item_column=" item")[0] == pairs


@pytest.mark.parametrize("repeated_header", ["user,item\n", "\ufeffuser,item\n", '"user", "item"\n'])
def test_a_header_again_is_left_out_and_counted(tmp_path, small_pieces, repeated_header):
    write(tmp_path, f"user,item\nu1,i1\n{repeated_header}u2,i2\n")
    write(tmp_path, f"user,item\nu3,i3\n{repeated_header}u4,i4\n", "b.csv.gz")
    pairs, report = read(tmp_path, "a.csv", "b.csv.gz")
    assert pairs == [("u1", "i1"), ("u2", "i2"), ("u3", "i3"), ("u4", "i4")]
    assert report["reasons"]["the header again"]["rows"] == 2


@pytest.mark.parametrize(
    ("header", "other_header"),
    [
        ("user,item", "item,user"),
        ("user,item,timestamp", "Item,User,Timestamp"),
        ("user,item,timestamp", "user,timestamp,item"),
        ("user,item,timestamp", '"item", "user", "timestamp"'),
        ("user,item,timestamp,weight", "user,item,weight,timestamp"),
        ("user,id,item,ts", "id,user,ts,item"),
    ],
)
def test_a_header_in_another_order_is_refused_by_its_line(tmp_path, small_pieces, header, other_header):
    """Rows below it would be read with users for items."""
    width = header.count(",") + 1
    rows = [",".join([f"u{row}", f"i{row}", "1", "1"][:width]) for row in range(20)]
    lines = [header, *rows, other_header, *rows]
    write(tmp_path, "\n".join(lines) + "\n")
    write(tmp_path, "\n".join(lines) + "\n", "b.csv.gz")
    names = other_header.replace('"', "").replace(" ", "")
    for name in ("a.csv", "b.csv.gz"):
        with pytest.raises(SourceError, match=f"{name}, line 22 is another header: {names}:"):
            read(tmp_path, name)


def test_the_line_of_a_row_is_told_far_below_the_header(tmp_path, small_pieces):
    write(tmp_path, "user,item\n" + "u1,i1\n" * 30 + "u2,i2,x\n")
    _, report = read(tmp_path, "a.csv")
    (reason,) = report["reasons"].values()
    assert reason["cases"] == [{"file": "a.csv", "line": "32"}]


def test_ids_that_are_names_of_columns_are_rows(tmp_path):
    write(tmp_path, "user,item,tag\nu1,i1,a\nitem,tag,b\ntag,user,c\n")
    pairs, report = read(tmp_path, "a.csv")
    assert pairs == [("u1", "i1"), ("item", "tag"), ("tag", "user")] and not report["left_out"]


@pytest.mark.parametrize("text", ["user,item\n", "user,item", "\ufeffuser,item\r\n"])
def test_a_file_of_a_header_alone_has_no_rows(tmp_path, text):
    write(tmp_path, text)
    write(tmp_path, "user,item,timestamp\nu1,i1,1700000000\n", "b.csv")
    assert read(tmp_path, "a.csv", "b.csv")[0] == [("u1", "i1")]


@pytest.mark.parametrize("name", ["A.CSV.GZ", "A.TXT.GZ", "A.CSV"])
def test_endings_may_be_capitals(tmp_path, name):
    raw = b"u1 i1\n" if "TXT" in name else b"user,item\nu1,i1\n"
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("GZ") else raw)
    assert read(tmp_path, name)[0] == [("u1", "i1")]


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff", "\r\n"])
def test_an_empty_file_is_refused(tmp_path, text):
    write(tmp_path, text)
    with pytest.raises(SourceError, match=r"cannot read .*a\.csv: it is empty"):
        read(tmp_path, "a.csv")


@pytest.mark.parametrize("byte_order_mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_utf_16_is_refused_with_a_remedy(tmp_path, byte_order_mark, name):
    coding = "utf-16-le" if byte_order_mark == codecs.BOM_UTF16_LE else "utf-16-be"
    write(tmp_path, byte_order_mark + "user,item\nu1,i1\n".encode(coding), name)
    with pytest.raises(SourceError, match=r"is UTF-16: convert it .*iconv"):
        read(tmp_path, name)


@pytest.mark.parametrize(
    ("settings", "message_pattern"),
    [
        ({"quote": ","}, "quote and separator are both ','"),
        ({"escape": '"'}, "escape and quote are both"),
        ({"quote": "é"}, "one ASCII character"),
        ({"quote": '""'}, "must be one character"),
    ],
)
def test_signs_with_two_meanings_are_refused(settings, message_pattern):
    with pytest.raises(ConfigError, match=message_pattern):
        Sources(("a.csv",), **settings)
