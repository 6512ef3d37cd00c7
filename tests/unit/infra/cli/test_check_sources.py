"""`larder check` on the files of sources: what a night would refuse, or what looks odd, is said before it."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import SourceError
from infra.cli.check import CheckResult, _run_check, check_sources
from precompute.bundles.bundle_store import hand_over
from precompute.config.settings import GateThresholds, NightConfig, Sources
from precompute.sources.readers import read_interactions
from tests.models import train_small


def check(folder: Path, rows: list[str], **sources: Any) -> CheckResult:
    (folder / "a.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    config = NightConfig(base=str(folder), sources=Sources(interactions=("a.csv",), **sources))
    return check_sources(config)


def clicks(count: int = 1000) -> list[str]:
    return [f"u{row % 150},i{row % 40},{1_700_000_000 + row}" for row in range(count)]


def test_usual_sources_are_ok(tmp_path: Path) -> None:
    assert check(tmp_path, clicks()) == ("ok", "1 file; 1,000 interactions")


def at(times: str, rows: list[str]) -> list[str]:
    """The same rows, at the times that a format gives by the number of each row."""
    return [f"{row.rpartition(',')[0]},{times.format(number)}" for number, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "expected_message"),
    [
        (clicks() + [f"0,i{row % 40},1700000000" for row in range(300)], "the user '0' has 23% of all rows"),
        (
            [f"u{row % 100},i{row} j{row} k{row},1700000000" for row in range(200)],
            "200 items in 200 rows: nearly every item occurs once, and most hold several words",
        ),
        (at("{}", clicks()), "the newest time is 1970-01-01"),
        (at("2100-01-01", clicks()), "the newest time is 2100-01-01"),
        (at("1970-01-02", clicks(9)) + clicks(), "9 of 1,009 rows have a time before 1980"),
        (at("0", clicks(100)) + clicks(900), "10% of the rows have no time"),
        (
            clicks() + [",".join([*row.split(",")[1::-1], "1700000000"]) for row in clicks()],
            "190 of 190 items are users, too: are the columns of users and items swapped",
        ),
        (
            [f"'{row.replace(',', chr(39) + ',', 1)}" for row in clicks()],
            "'user' has quotes around its ids in 1,000 of 1,000 rows, such as \"'u",
        ),
        (
            [*clicks(500), "user,item,timestamp", *clicks(500)],
            "1,000 interactions, 1 rows that cannot be used: 1 the header again",
        ),
    ],
    ids=[
        "an id with a fifth",
        "lists in a field",
        "times of 1970",
        "times of 2100",
        "some times of 1970",
        "no times",
        "swapped columns",
        "quotes",
        "a header again",
    ],
)
def test_what_looks_odd_is_said(tmp_path: Path, rows: list[str], expected_message: str) -> None:
    state, message = check(tmp_path, rows)

    assert state == "ok" and expected_message in message


def test_too_little_data_is_to_do(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="too little data: 1 user and 1 item; at least 2 users"):
        check(tmp_path, ["u,i,1700000000"])


def test_one_item_for_each_user_is_to_do_as_train_refuses_it(tmp_path: Path) -> None:
    state, message = check(tmp_path, [f"u{row},i{row % 40},1700000000" for row in range(500)])

    assert state == "to do" and "each of the 500 users has one item" in message


@pytest.mark.parametrize(
    ("name", "content", "expected_message"),
    [
        ("a.parquet", b"", r"it is empty; copy it again"),
        ("a.parquet", b"PAR1 and no more of it, alas", r"is it complete, and in the format"),
        ("a.parquet", b"ARROW1\x00\x00" * 9, r"is an Arrow file by its first bytes"),
        ("a.parquet", b"user,item\nu1,i1\n", r"it looks like rows of text: rename it to end in \.csv"),
        ("a.csv", "user,item,wo\u00f6\nu1,i1,x\n".encode("latin-1"), r"it is not UTF-8; convert it"),
        ("a.csv.gz", gzip.compress(b"user,item\nu1,i1\n" * 999, mtime=0)[:40], r"it is cut off; copy it again"),
        ("a.csv", b"245,1,1701329145\n234,38,1701044604\n", "has no line of column names: put one above"),
        ("a.csv", b"Export of clicks\nuser,item\nu1,i1\n", "is the first line a title"),
        ("a.csv", b'"user,item"\n"u1,i1"\n', "each row is quoted as a whole"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_told_as_by_a_night(
    tmp_path: Path, name: str, content: bytes, expected_message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    config = NightConfig(base=str(tmp_path), sources=Sources(interactions=(name,)))

    with pytest.raises(SourceError, match=expected_message):
        check_sources(config)
    with pytest.raises(SourceError, match=expected_message):
        list(read_interactions(config.sources, tmp_path))


def test_a_row_named_as_columns_is_not_taken_for_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("245,1,1701329145\n234,38,1701044604\n")
    sources = Sources(interactions=("a.csv",), user_column="245", item_column="1")

    with pytest.raises(SourceError, match="has no line of column names: put one above"):
        list(read_interactions(sources, tmp_path))
    (tmp_path / "a.csv").write_text("0,1,2\nu1,i1,1701329145\n")
    sources = Sources(interactions=("a.csv",), user_column="0", item_column="1")
    assert len(list(read_interactions(sources, tmp_path))) == 1


def test_a_table_of_items_without_rows_is_to_do(tmp_path: Path) -> None:
    pq.write_table(pa.table({"item": pa.array([], pa.string())}), tmp_path / "items.parquet")

    state, message = check(tmp_path, clicks(), item_features="items.parquet")

    assert (state, message.startswith("items.parquet has no rows")) == ("to do", True)


def test_a_table_with_a_log_is_to_do(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()

    with pytest.raises(SourceError, match="is a Delta table"):
        check(tmp_path, clicks())


def test_a_copy_of_a_file_is_said(tmp_path: Path) -> None:
    """Of a download that was repeated every row would count twice."""
    text = "user,item,timestamp\n" + "\n".join(clicks()) + "\n"
    for name in ("a.csv", "a (1).csv"):
        (tmp_path / name).write_text(text)
    (tmp_path / "b.csv").write_text(text.replace("u1", "v1"))
    config = NightConfig(base=str(tmp_path), sources=Sources(interactions=("*.csv",)))

    state, message = check_sources(config)

    assert state == "ok"
    assert message.endswith("a (1).csv and a.csv hold the same bytes, so their rows count 2 times: keep one of them")


def test_days_with_a_header_alone_are_no_copies(tmp_path: Path) -> None:
    for day in ("14", "15"):
        (tmp_path / f"{day}.csv").write_text("user,item,timestamp\n")
    (tmp_path / "16.csv").write_text("user,item,timestamp\n" + "\n".join(clicks()) + "\n")
    config = NightConfig(base=str(tmp_path), sources=Sources(interactions=("*.csv",)))

    assert "same bytes" not in check_sources(config)[1]


@pytest.mark.parametrize(
    ("rows", "expected_message"),
    [
        (
            [f"{row % 150},i{row % 40},{1_700_000_000 + row}" for row in range(1000)]
            + ["99.0,i1,1800000000", "1.2E+11,i2,1800000001", "1e+05,i3,1800000002"],
            "'user' has whole numbers written as fractions in 3 of 1,003 rows, such as '",
        ),
        (
            [*clicks(), '="u0001",i1,1800000000'],
            "'user' has a spreadsheet's =\"...\" around its ids in 1 of 1,001 rows, such as '=\"u0001\"'",
        ),
        (
            [*clicks(), "U7,i1,1800000000", "u7,I 3,1800000001"],
            "1 user comes in more than one form, such as 'U7' and 'u7',",
        ),
        ([*clicks(), "u7,I 3,1800000001"], "1 item comes in more than one form, such as 'I 3' and 'i3',"),
        (
            [f"{row % 150},i{row % 40},{1_700_000_000 + row}" for row in range(1000)]
            + ["007,i1,1800000000", "+8,i1,1800000000"],
            "2 users come in more than one form, such as '",
        ),
        (
            [*clicks(), "caf\u00e9,i1,1800000000", "cafe\u0301,i1,1800000001"],
            r"such as 'cafe\u0301' and 'caf\xe9',",
        ),
        ([*clicks(), *clicks(30)], "30 of 1,030 rows repeat another row of their file (user, item and time)"),
        (
            [row.rpartition(",")[0] + ",0" for row in clicks(600) * 2],
            "600 of 1,200 rows repeat another row of their file (user and item)",
        ),
    ],
    ids=[
        "a few floats", "a formula", "two cases", "a blank", "zeros and a plus", "composed letters", "repeats",
        "repeats without times",
    ],
)  # fmt: skip
def test_one_id_in_two_forms_and_rows_that_repeat_are_said_however_few(
    tmp_path: Path, rows: list[str], expected_message: str
) -> None:
    state, message = check(tmp_path, rows)

    assert state == "ok" and expected_message in message


def test_an_id_of_the_catalogue_in_another_form_is_said(tmp_path: Path) -> None:
    ids = [f"i{number}" for number in range(39)] + ["I39"]
    pq.write_table(pa.table({"item": ids}), tmp_path / "items.parquet")

    _, message = check(tmp_path, clicks(), item_features="items.parquet")

    assert "1 item comes in more than one form, such as 'I39' and 'i39'," in message


def test_usual_ids_in_capitals_and_with_zeros_are_of_one_form(tmp_path: Path) -> None:
    rows = [f"{row % 150:06d},B0{row % 40:03d}X,{1_700_000_000 + row}" for row in range(1000)]

    assert check(tmp_path, rows) == ("ok", "1 file; 1,000 interactions")


def test_a_file_beside_itself_compressed_and_exports_that_overlap_are_said(tmp_path: Path) -> None:
    header = "user,item,timestamp\n"
    text = header + "\n".join(clicks()) + "\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.csv").write_text(header + "\n".join(clicks(1100)[950:]) + "\n")
    sources = Sources(interactions=("a.csv", "b.csv"))

    _, overlap = check_sources(NightConfig(base=str(tmp_path), sources=sources))
    sources = Sources(interactions=("a.csv", "a.csv.gz"))
    _, copy = check_sources(NightConfig(base=str(tmp_path), sources=sources))

    assert "a.csv and b.csv hold 50 rows in common (user, item and time), which count twice" in overlap
    assert "a.csv and a.csv.gz hold the same 1,000 rows (user, item and time), which count" in copy


@pytest.mark.parametrize("spoil", ["no column", "not named", "zeros"])
def test_a_cut_where_no_row_has_a_time_is_to_do(tmp_path: Path, spoil: str) -> None:
    rows = at("0", clicks()) if spoil == "zeros" else clicks()
    (tmp_path / "a.csv").write_text(
        f"user,item,{'at' if spoil == 'no column' else 'timestamp'}\n" + "\n".join(rows) + "\n"
    )
    column = "" if spoil == "not named" else "timestamp"
    config = NightConfig(
        base=str(tmp_path),
        data_until="2024-01-01T00:00:00Z",
        sources=Sources(interactions=("a.csv",), timestamp_column=column),
    )

    line = _run_check("sources", lambda: check_sources(config))

    assert line.state == "to do"
    assert line.told.startswith("data_until is 2024-01-01T00:00:00Z, but no interaction has a time")
    assert "[sources] timestamp_column" in line.told


def write_items(folder: Path, form: str, **columns: Any) -> None:
    ids = [form.format(number) for number in range(40)]
    pq.write_table(pa.table({"item": ids} | columns), folder / "items.parquet")


def test_clicks_whose_items_have_another_form_than_the_catalogue_are_said(tmp_path: Path) -> None:
    write_items(tmp_path, "{:06d}")

    state, message = check(tmp_path, clicks(), item_features="items.parquet")

    assert state == "to do"
    expected_message = "100% of the interactions name items that the catalogue (items.parquet) does"
    assert expected_message in message and "[sources] item_column" in message
    assert "the catalogue (items.parquet) has '000000' and '000001'" in message
    assert "interactions have 'i" in message


def test_items_of_one_form_are_not_remarked_on(tmp_path: Path) -> None:
    write_items(tmp_path, "i{}")

    assert check(tmp_path, clicks(), item_features="items.parquet") == (
        "ok", "2 files; 1,000 interactions"
    )  # fmt: skip


def test_clicks_on_items_that_the_model_does_not_know_are_said(tmp_path: Path) -> None:
    train_small(tmp_path / ".larder" / "bundle")

    state, message = check(tmp_path, [row.replace(",i", ",sku-") for row in clicks()])

    assert state == "to do"
    assert "100% of the interactions name items that the model does not have" in message


def test_a_column_of_attributes_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_items(tmp_path, "i{}", price=[1.0] * 40)
    tables = {"item_features": "items.parquet", "item_attributes": ("price", "colour")}

    with pytest.raises(SourceError, match="colour"):
        check(tmp_path, clicks(), **tables)


@pytest.mark.parametrize("threshold", [0.001, 0.1])
def test_rows_that_would_refuse_the_night_are_to_do(tmp_path: Path, threshold: float) -> None:
    (tmp_path / "a.csv").write_text(
        "user,item,timestamp\n" + "\n".join([*clicks(950), *[",i1,1700000000"] * 50]) + "\n"
    )
    config = NightConfig(
        base=str(tmp_path), sources=Sources(interactions=("a.csv",)), gates=GateThresholds(unusable_rows=threshold)
    )

    state, message = check_sources(config)

    assert "50 rows that cannot be used: 50 user: an id of 0" in message
    assert (state, "a night refuses more than 0.001 of them" in message) == (
        ("to do", True) if threshold < 0.05 else ("ok", False)
    )


def test_rows_of_the_catalogue_that_would_refuse_the_night_are_to_do(tmp_path: Path) -> None:
    ids = [f"i{number}" for number in range(40)]
    pq.write_table(pa.table({"item": ids + ids[:4]}), tmp_path / "items.parquet")

    state, message = check(tmp_path, clicks(), item_features="items.parquet")

    assert state == "to do"
    assert message.startswith("4 of the 44 rows of item_features cannot be used (4 listed before)")


def test_a_bundle_in_the_store_alone_is_compared_with_too(tmp_path: Path) -> None:
    bundle = train_small(tmp_path / "elsewhere")
    config = NightConfig(base=str(tmp_path), artifacts=str(tmp_path / "store"), sources=Sources(("a.csv",)))
    hand_over(config.store(), bundle)
    rows = [row.replace(",i", ",sku-") for row in clicks()]
    (tmp_path / "a.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")

    assert "name items that the model does not have" in check_sources(config)[1]
