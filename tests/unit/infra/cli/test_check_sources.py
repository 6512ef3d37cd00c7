"""`larder check` on the files of sources: what a night would refuse, or what looks odd, is said before it."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import SourceError
from infra.cli.check import CheckResult, look_at_sources
from precompute.bundles.bundle_store import hand_over
from precompute.config.settings import GateThresholds, NightConfig, Sources
from precompute.sources.readers import read_interactions
from tests.models import train_small


def check(folder: Path, rows: list[str], **sources: Any) -> CheckResult:
    (folder / "a.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    config = NightConfig(base=str(folder), sources=Sources(interactions=("a.csv",), **sources))
    return look_at_sources(config)


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
        (
            clicks() + [f"0,i{row % 40},1700000000" for row in range(300)],
            "the user '0' has 23% of all rows",
        ),
        (
            [f"u{row % 100},i{row} j{row} k{row},1700000000" for row in range(200)],
            "200 items in 200 rows: nearly each comes once, and most hold several words",
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
            "'user' has quotes around 150",
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
        ("a.parquet", b"PAR1 and no more of it, alas", r"is it whole, and of the format"),
        ("a.parquet", b"ARROW1\x00\x00" * 9, r"is an Arrow file by its first bytes"),
        ("a.parquet", b"user,item\nu1,i1\n", r"it looks like rows of text: rename it to end in \.csv"),
        ("a.csv", "user,item,wo\u00f6\nu1,i1,x\n".encode("latin-1"), r"it is not UTF-8; convert it"),
        ("a.csv.gz", gzip.compress(b"user,item\nu1,i1\n" * 999)[:40], r"it is cut off; copy it again"),
        ("a.csv", b"245,1,1701329145\n234,38,1701044604\n", "has no line of column names: put one above"),
        ("a.csv", b"Export of clicks\nuser,item\nu1,i1\n", "is the first line a title"),
        ("a.csv", b'"user,item"\n"u1,i1"\n', "each row stands between quotes as a whole"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_told_as_by_a_night(
    tmp_path: Path, name: str, content: bytes, expected_message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    config = NightConfig(base=str(tmp_path), sources=Sources(interactions=(name,)))

    with pytest.raises(SourceError, match=expected_message):
        look_at_sources(config)
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

    state, message = look_at_sources(config)

    assert state == "ok"
    assert message.endswith(
        "a (1).csv and a.csv hold the same bytes, so their rows count 2 times: leave one of them"
    )


def test_days_with_a_header_alone_are_no_copies(tmp_path: Path) -> None:
    for day in ("14", "15"):
        (tmp_path / f"{day}.csv").write_text("user,item,timestamp\n")
    (tmp_path / "16.csv").write_text("user,item,timestamp\n" + "\n".join(clicks()) + "\n")
    config = NightConfig(base=str(tmp_path), sources=Sources(interactions=("*.csv",)))

    assert "same bytes" not in look_at_sources(config)[1]


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
        base=str(tmp_path),
        sources=Sources(interactions=("a.csv",)),
        gates=GateThresholds(unusable_rows=threshold),
    )

    state, message = look_at_sources(config)

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
    config = NightConfig(
        base=str(tmp_path), artifacts=str(tmp_path / "store"), sources=Sources(("a.csv",))
    )
    hand_over(config.store(), bundle)
    rows = [row.replace(",i", ",sku-") for row in clicks()]
    (tmp_path / "a.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")

    assert "name items that the model does not have" in look_at_sources(config)[1]
