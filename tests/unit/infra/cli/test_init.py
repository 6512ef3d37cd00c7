"""`larder init`: what it recognises in a folder, what it writes, and what it leaves to the user."""

import gzip
import json
import os
import re
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import SourceError
from infra.cli.__main__ import main
from infra.cli.init.guesses import guess_roles
from infra.cli.init.tables import ColumnKind
from precompute.config.settings import night_config
from precompute.sources.readers import read_interactions

USERS = [f"u{number % 5}" for number in range(60)]
ITEMS = [number % 12 for number in range(60)]
TIMES = [1_700_000_000 + number for number in range(60)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_csv(path: Path, columns: dict[str, list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")


def write_parquet(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def init(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """What the command tells; the file it wrote is one that a night can be configured by."""
    capsys.readouterr()
    assert main(["init", "--json", *arguments]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    night_config(report["file"], {})
    return report


@pytest.mark.parametrize(
    ("user", "item", "timestamp", "weight"),
    [
        ("user_id", "item_id", "timestamp", "weight"),
        ("userId", "movieId", "timestamp", "rating"),
        ("uid", "product_id", "ts", "count"),
        ("visitorid", "itemid", "time", "score"),
        ("CustomerID", "StockCode", "InvoiceDate", "Quantity"),
        ("customer_id", "article_id", "t_dat", "quantity"),
        ("reviewerID", "asin", "unixReviewTime", "overall"),
        ("user", "track_id", "created_at", "plays"),
        ("src_user_id", "clicked_article_id", "event_time", "stars"),
        ("customer", "sku", "ordered_at", "qty"),
        ("user", "item", "viewDate", "plays"),
    ],
)
def test_usual_names_are_recognised_and_can_be_read(
    here: Path, capsys: pytest.CaptureFixture[str], user: str, item: str, timestamp: str, weight: str
) -> None:
    columns: dict[str, list[Any]] = {"x": [1.5] * 60, weight: [3] * 60, timestamp: TIMES, item: ITEMS, user: USERS}
    write_csv(here / "data" / "log.csv", columns)

    report = init(capsys, "data")

    assert report["columns"] == {"user": user, "item": item, "timestamp": timestamp, "weight": weight}
    assert (report["interactions"], report["missing"]) == (["data/log.csv"], [])
    config = night_config("larder.toml", {})
    (batch,) = read_interactions(config.sources, config.path("."))
    assert (len(batch.user_ids), batch.times_us.min()) == (60, TIMES[0] * 1_000_000)


def test_a_length_of_time_is_no_moment() -> None:
    kinds: dict[str, ColumnKind] = {"user": "text", "item": "text", "watch_time": "integer"}

    assert guess_roles(kinds).column_by_role == {"user": "user", "item": "item"}


def test_feature_tables_are_recognised_and_few_items_get_a_small_model(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(here / "clicks" / "a.parquet", {"userId": USERS, "movieId": ITEMS})
    write_parquet(here / "clicks" / "b.parquet", {"userId": USERS, "movieId": ITEMS})
    write_parquet(here / "movies.parquet", {"movieId": list(range(12)), "genre": ["a", "b"] * 6})
    write_parquet(here / "people.parquet", {"userId": USERS[:5], "age": [1.0] * 5})

    report = init(capsys)

    assert report["interactions"] == ["clicks/*.parquet"]
    assert report["features"] == {"item": "movies.parquet", "user": "people.parquet"}
    assert report["category"] == "genre"
    assert tomllib.loads((here / "larder.toml").read_text())["reference"] == {"dims": 4}


def test_partitions_in_folders_become_one_pattern(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in ("01", "02"):
        write_parquet(here / "events" / f"day={day}" / "p.parquet", {"user": USERS, "item": ITEMS})

    report = init(capsys)

    assert report["interactions"] == ["events/**/*.parquet"]
    assert any("have values of day in their names, which are not read" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("columns", "note"),
    [
        ({"movieId": ITEMS[:12], "twice": ["a"] * 12}, "features are read from Parquet"),
        ({"product": ITEMS[:12]}, "give both the same name"),
        ({"movieId": ITEMS[:24]}, "some ids come twice"),
        ({"what": ["x"]}, "neither users nor items were recognised"),
    ],
)
def test_a_table_that_is_not_used_is_named_with_the_reason(
    here: Path, capsys: pytest.CaptureFixture[str], columns: dict[str, list[Any]], note: str
) -> None:
    write_parquet(here / "log.parquet", {"userId": USERS, "movieId": ITEMS})
    write = write_csv if "twice" in columns else write_parquet
    write(here / f"other.{'csv' if 'twice' in columns else 'parquet'}", columns)

    report = init(capsys)

    assert report["features"] == {}
    assert [remark for remark in report["notes"] if note in remark and "other." in remark]
    assert note in " ".join((here / "larder.toml").read_text().replace("\n# ", " ").split())


@pytest.mark.parametrize(
    ("columns", "note"),
    [
        ({"ts": [1_700_000_000_000 + offset_ms for offset_ms in range(60)]}, "milliseconds"),
        ({"ts": ["yesterday"] * 60}, "no times"),
        ({"user_id": [1.5] * 60}, "holds float values"),
        ({"rating": [0, 5] * 30}, "50% of the first rows"),
    ],
)
def test_columns_that_a_night_could_not_read_are_said(
    here: Path, capsys: pytest.CaptureFixture[str], columns: dict[str, Any], note: str
) -> None:
    write_parquet(here / "log.parquet", {"uid": USERS, "sku": ITEMS, **columns})

    report = init(capsys)

    assert [remark for remark in report["notes"] if note in remark]
    assert report["columns"]["timestamp"] is None
    assert tomllib.loads((here / "larder.toml").read_text())["sources"]["timestamp_column"] == ""


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("user::item\na::b\n", "has fields between double colons"),
        ("1,31,2.5\n1,32,3\n", "has no line of column names"),
        ("", "cannot be read"),
    ],
)
def test_a_file_that_is_no_table_is_said_and_something_is_left_to_do(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, note: str
) -> None:
    (here / "log.csv").write_text(text)

    report = init(capsys, code=3)

    assert any(f"log.csv {note}" in remark for remark in report["notes"])
    assert "none of the files found can be read" in report["missing"][0]
    assert "# TO DO:" in (here / "larder.toml").read_text()


def test_vectors_are_left_to_the_import(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(here / "orders.parquet", {"customer_no": USERS, "article_nr": ITEMS})
    vectors = [[0.5, 0.25]] * 12
    write_parquet(here / "articles.parquet", {"article_nr": sorted(set(ITEMS)), "v": vectors})

    report = init(capsys)

    assert (report["columns"]["user"], report["columns"]["item"]) == ("customer_no", "article_nr")
    assert report["features"] == {}
    assert any("articles.parquet looks like vectors of items" in note for note in report["notes"])


@pytest.mark.parametrize(("name", "sign"), [("log.csv", ";"), ("log.tsv", "\t"), ("log.csv", "|")])
def test_a_file_with_another_sign_between_its_fields_is_read_by_it(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, sign: str
) -> None:
    rows = zip(USERS, ITEMS, TIMES, strict=True)
    lines = [sign.join(("uid", "sku", "ts")), *(sign.join(map(str, row)) for row in rows)]
    (here / name).write_text("\n".join(lines) + "\n")

    init(capsys)

    config = night_config(str(here / "larder.toml"), {})
    assert config.sources.separator == sign
    (batch,) = read_interactions(config.sources, here)
    assert len(batch.times_us) == 60 and batch.times_us[0] == TIMES[0] * 1_000_000


def test_the_one_column_that_holds_times_is_taken_for_them_whatever_its_name(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bought = pa.array(TIMES, pa.timestamp("s"))
    write_parquet(here / "log.parquet", {"uid": USERS, "sku": ITEMS, "bought": bought})

    report = init(capsys)

    assert report["columns"]["timestamp"] == "bought"
    assert any("'bought' is taken for the timestamp" in note for note in report["notes"])


def test_that_no_column_of_times_was_recognised_is_said_with_those_there_are(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(here / "log.parquet", {"uid": USERS, "sku": ITEMS, "shop": ITEMS})

    report = init(capsys)

    assert any("no column of times was recognised among shop" in note for note in report["notes"])


def test_what_could_not_be_guessed_is_said_with_what_to_write(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(here / "log.parquet", {"a": USERS, "b": ITEMS, "c": ITEMS})

    report = init(capsys, code=3)

    assert [missing_line.split(":")[0] for missing_line in report["missing"]] == [
        "[sources] user_column", "[sources] item_column",
    ]  # fmt: skip
    assert "(a, b, c)" in report["missing"][0]


def test_the_one_column_that_is_left_is_reported_as_a_guess() -> None:
    roles = guess_roles({"uid": "text", "thing": "text", "ts": "integer", "price": "float"})

    assert roles.column_by_role == {"user": "uid", "item": "thing", "timestamp": "ts"}
    assert roles.guessed_roles == ("item",)


def test_nothing_is_overwritten_unless_it_is_asked_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "larder.toml").write_text("# mine\n")

    assert main(["init"]) == 2
    assert "larder.toml exists and is not overwritten" in capsys.readouterr().err
    assert (here / "larder.toml").read_text() == "# mine\n"
    init(capsys, "--force", code=3)
    assert (here / "larder.toml").read_text() != "# mine\n"


def test_names_that_mean_something_to_toml_stay_what_they_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = here / 'odd "names" é'
    write_parquet(folder / "log [1].parquet", {'user "id"': USERS, "item\tid": ITEMS, "ts\n": TIMES})

    report = init(capsys, folder.name)

    sources = tomllib.loads((here / "larder.toml").read_text())["sources"]
    assert sources["interactions"] == report["interactions"] == ['odd "names" é/log [1].parquet']
    assert (sources["user_column"], sources["item_column"]) == ('user "id"', "item\tid")


def test_a_bundle_that_is_there_is_used(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(here / "log.parquet", {"user": USERS, "item": ITEMS})
    (here / "model").mkdir()
    (here / "model" / "bundle.json").write_text("{}")

    assert init(capsys)["bundle"] == "model"


def test_a_folder_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("larder: there is no folder nowhere")


@pytest.mark.parametrize(
    ("text", "message_pattern"),
    [
        ('user,item,title\nu1,i1,"Heat\nu2,i2,x\n', r'line 2: a quote is not closed.*quote = ""'),
        (
            "user,item,timestamp\nNULL,i1,1700000000\nu2,i2,1700000000\n",
            "of the first 2 rows, 1 cannot be used: user: no id",
        ),
        ("user,item,date\nu1,i1,20231114\nu2,i2,20231115\n", "dates as yyyymmdd: they are read as UTC"),
        ("user,item,day\nu1,i1,19675\nu2,i2,19676\n", "numbers of days.*write dates"),
        ('user,item,title\nu1,i1,"a \\"b\\" c"\n', "a backslash is before a quote"),
        ("user,item,date\n17850.0,i1,2023-11-14\n", "Int64"),
    ],
)
def test_what_a_night_would_make_of_the_first_rows_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, message_pattern: str
) -> None:
    (here / "clicks.csv").write_text(text)
    capsys.readouterr()
    main(["init", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert re.search(message_pattern, "; ".join([*report["notes"], *report["missing"]]))


def test_a_text_file_that_looks_like_a_table_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "checkins.txt").write_text("1\t2023-11-30T07:25:45Z\t30.01\t-97.01\t22001\n" * 3)
    report = init(capsys, code=3)
    assert any("5 fields in each line, with tabs between them" in note for note in report["notes"])


def test_nothing_is_said_of_rows_that_a_night_reads_as_they_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(here / "clicks.csv", {"user": USERS, "item": ITEMS, "timestamp": TIMES})
    assert init(capsys)["notes"] == []


def clicks_of(rows: int, day: str = "a") -> dict[str, list[Any]]:
    numbers = range(rows)
    return {
        "user": [f"u{number % 7}" for number in numbers],
        "item": [f"{day}{number % 12}" for number in numbers],
        "timestamp": [1_700_000_000 + number for number in numbers],
    }


def odd_latin1(path: Path) -> None:
    path.with_suffix(".csv").write_bytes("user,item,größe\nu,i,1\n".encode("latin-1"))


def odd_utf16(path: Path) -> None:
    path.with_suffix(".csv").write_bytes("user,item\nu,i\n".encode("utf-16"))


def odd_parquet(path: Path) -> None:
    path.with_suffix(".parquet").write_bytes(b"PAR1 and nothing else PAR1")


def odd_twice(path: Path) -> None:
    columns = [pa.array(["u"]), pa.array(["i"]), pa.array(["v"])]
    pq.write_table(pa.Table.from_arrays(columns, ["user", "item", "user"]), path.with_suffix(".parquet"))


def odd_widths(path: Path) -> None:
    path.with_suffix(".csv").write_text("user,item,timestamp\nu,i,1,\nu,j,2,\n")


def odd_empty(path: Path) -> None:
    path.with_suffix(".csv").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "remark_pattern"),
    [
        (odd_latin1, r"odd\.csv is not UTF-8: convert it"),
        (odd_utf16, r"odd\.csv is UTF-16: convert it .*iconv"),
        (odd_parquet, r"odd\.parquet cannot be read"),
        (odd_twice, r"odd\.parquet has several columns called 'user'"),
        (odd_widths, r"odd\.csv has 3 column names and 4 fields .* behind the last field"),
        (odd_empty, r"odd\.csv cannot be read: it is empty"),
    ],
)
def test_an_odd_file_costs_one_remark_that_names_it_and_the_look_goes_on(
    here: Path, capsys: pytest.CaptureFixture[str], spoil: Any, remark_pattern: str
) -> None:
    write_csv(here / "clicks" / "a.csv", clicks_of(60))
    spoil(here / "odd")

    report = init(capsys)

    assert report["interactions"] == ["clicks/a.csv"]
    assert [note for note in report["notes"] if re.search(remark_pattern, note)], report["notes"]
    assert len([note for note in report["notes"] if "odd." in note]) == 1


@pytest.mark.parametrize("name", ["2.csv", "late.csv"])
def test_an_unreadable_file_of_clicks_stays_in_the_pattern_and_is_to_do(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It was left out without a word of the next commands, and its clicks with it."""
    write_csv(here / "clicks" / "1.csv", clicks_of(60))
    odd_utf16(here / "clicks" / name)

    report = init(capsys, code=3)

    assert report["interactions"] == ["clicks/*.csv"]
    (missing,) = report["missing"]
    assert missing.startswith(f"clicks/{name} is UTF-16: convert it") and "repair the file" in missing
    assert not report["notes"]
    sources = night_config(report["file"], {}).sources
    with pytest.raises(SourceError, match=rf"{name} is UTF-16"):
        list(read_interactions(sources, here))


def test_an_empty_file_beside_one_of_clicks_is_to_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(here / "b.csv", clicks_of(60))
    (here / "clicks.csv").write_bytes(b"")

    report = init(capsys, code=3)

    assert report["interactions"] == ["*.csv"]
    assert report["missing"][0].startswith("clicks.csv cannot be read: it is empty")


def test_a_damaged_table_of_items_is_in_no_pattern_of_clicks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(here / "clicks.parquet", clicks_of(60))
    (here / "items.parquet").write_bytes(b"PAR1 and no more")

    report = init(capsys)

    assert report["interactions"] == ["clicks.parquet"]
    assert any(note.startswith("items.parquet cannot be read") for note in report["notes"])


def test_a_file_whose_name_is_not_utf_8_costs_one_remark(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(here / "a.csv", clicks_of(60))
    name = os.fsdecode(b"gr\xf6sse.csv")
    (here / name).write_text("user,item\nu,i\n")

    report = init(capsys)

    assert report["interactions"] == ["a.csv"]
    assert any("name that is not UTF-8: rename it" in note for note in report["notes"])


def test_a_day_with_a_header_alone_is_one_of_the_days(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "2023-11-14.csv").write_text("user,item,timestamp\n")
    write_csv(here / "2023-11-15.csv", clicks_of(60))

    report = init(capsys)

    assert report["interactions"] == ["*.csv"]
    assert report["columns"]["timestamp"] == "timestamp"
    assert report["notes"] == ["2023-11-14.csv has a header and no rows"]


def test_everyday_types_of_other_programs_are_columns_like_others(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Categoricals of pandas and Polars, string views, whole decimals of Oracle and Snowflake."""
    clicks = clicks_of(60)
    whole_decimals = pa.array([Decimal(number) for number in range(60)], pa.decimal128(38, 0))
    table = {
        "user": pa.array(clicks["user"]).dictionary_encode(),
        "item": whole_decimals,
        "timestamp": pa.array(clicks["timestamp"]).cast(pa.decimal128(22, 2)),
    }
    write_parquet(here / "clicks.parquet", table)
    view = pa.array([f"i{number}" for number in range(12)], pa.string_view())
    write_parquet(here / "items.parquet", {"item": view, "size": [1.0] * 12})

    report = init(capsys)

    assert report["columns"] == {
        "user": "user", "item": "item", "timestamp": "timestamp", "weight": None,
    }  # fmt: skip
    assert report["features"] == {"item": "items.parquet"}


def test_ids_of_twenty_digits_are_whole_numbers_in_csv(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [str(10**19 + number) for number in range(60)]
    write_csv(here / "a.csv", {**clicks_of(60), "user": ids})

    assert init(capsys)["columns"]["user"] == "user"


def test_a_header_in_the_middle_costs_no_times(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(here / "a.csv", clicks_of(60))
    text = (here / "a.csv").read_text()
    (here / "a.csv").write_text(text + text)

    report = init(capsys)

    assert report["columns"]["timestamp"] == "timestamp"
    assert report["notes"][0] == "a.csv has its header again in 1 of its first rows"


def test_what_another_program_left_in_a_folder_is_in_no_pattern(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A night reads just the files that this command looked at."""
    for part in ("day=1/a", "day=2/b", "_temporary/0/c", "day=2/.d", "day=2/~$e"):
        write_parquet(here / "clicks" / f"{part}.parquet", clicks_of(60, part))

    report = init(capsys)

    assert report["interactions"] == ["clicks/**/*.parquet"]
    config = night_config("larder.toml", {})
    batches = list(read_interactions(config.sources, config.path(".")))
    assert sum(len(batch.user_ids) for batch in batches) == 120


@pytest.mark.parametrize("log", ["_delta_log/0.json", "metadata/v1.metadata.json"])
def test_a_table_with_a_log_is_named_and_left_out(here: Path, capsys: pytest.CaptureFixture[str], log: str) -> None:
    write_csv(here / "a.csv", clicks_of(60))
    write_parquet(here / "lake" / "clicks" / "data" / "b.parquet", clicks_of(6000))
    (here / "lake" / "clicks" / log).parent.mkdir(exist_ok=True)
    (here / "lake" / "clicks" / log).write_text("{}")

    report = init(capsys)

    assert report["interactions"] == ["a.csv"]
    assert any(re.match(r"lake/clicks is an? \w+ table, and is not", note) for note in report["notes"])


def test_a_history_in_one_field_is_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    histories = [" ".join(f"i{number + step}" for step in range(5)) for number in range(60)]
    write_csv(here / "a.csv", {"user_id": list(range(60)), "items": histories})

    report = init(capsys)

    assert any("whole history in each field" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("name", "remark_pattern"),
    [
        ("reviews.json", "JSON is not read"),
        ("clicks.csv.zst", "unpack it, or compress it with gzip"),
        ("u.data", r"rename it to \.tsv"),
        ("clicks.xlsx", "save the sheet as CSV"),
        ("train.TXT", r"user item item"),
    ],
)
def test_files_that_are_not_taken_are_named_with_the_reason(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, remark_pattern: str
) -> None:
    (here / name).write_bytes(b"196\t242\t3\t881250949\n")

    report = init(capsys, code=3)

    assert [note for note in report["notes"] if note.startswith(name)]
    assert re.search(remark_pattern, report["notes"][0])


def test_files_in_capitals_and_deep_folders_are_taken(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(here / "year=2023" / "month=11" / "day=14" / "hour=3" / "CLICKS.CSV", clicks_of(60))

    report = init(capsys)

    assert report["interactions"] == ["year=2023/month=11/day=14/hour=3/CLICKS.CSV"]
    config = night_config("larder.toml", {})
    (batch,) = read_interactions(config.sources, config.path("."))
    assert len(batch.user_ids) == 60


@pytest.mark.parametrize(
    "users",
    [
        [f"{17850 + number}.0" for number in range(60)],
        pa.array([17850.0 + number for number in range(60)]),
        pa.array([number.to_bytes(2) for number in range(60)], pa.binary()),
        pa.array([number % 2 == 0 for number in range(60)]),
    ],
    ids=["CSV", "floats", "binary", "truth values"],
)
def test_a_column_whose_values_a_night_refuses_is_written_down_and_its_remedy_is_to_do(
    here: Path, capsys: pytest.CaptureFixture[str], users: Any
) -> None:
    """Whoever mends the file need not look for the column, and `larder check` says the same remedy till then."""
    columns = {"CustomerID": users, "StockCode": ITEMS, "InvoiceNo": ITEMS, "InvoiceDate": TIMES}
    if isinstance(users, list):
        write_csv(here / "retail.csv", columns)
    else:
        write_parquet(here / "retail.parquet", columns)

    report = init(capsys, code=3)

    assert (report["columns"]["user"], report["columns"]["item"]) == ("CustomerID", "StockCode")
    (missing,) = report["missing"]
    assert re.search("'CustomerID' looks like the user.*ids are text or whole numbers", missing)
    assert not any("has a usual name for" in line for line in (*report["notes"], missing))
    config = night_config("larder.toml", {})
    with pytest.raises(SourceError, match="column 'CustomerID'"):
        list(read_interactions(config.sources, config.path(".")))


def test_lists_of_items_are_reported_with_the_form_to_write(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(here / "log.parquet", {"user": USERS, "things": [["a", "b"]] * 60})

    report = init(capsys, code=3)

    assert any("'things' of log.parquet holds lists" in note for note in report["notes"])


@pytest.mark.parametrize("text", ["user,item,timestamp", "user,item,timestamp\n"])
def test_a_table_without_rows_has_the_columns_that_its_names_say(
    here: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (here / "a.csv").write_text(text)

    report = init(capsys)

    assert report["columns"]["timestamp"] == "timestamp"
    assert report["notes"] == ["a.csv has a header and no rows"]


def test_ids_that_are_not_utf_8_are_reported_as_a_night_leaves_them_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{user},é{item}\n" for user, item in zip(USERS, ITEMS, strict=True))
    (here / "a.csv").write_bytes(("user,item\n" + rows).encode("latin-1"))
    capsys.readouterr()

    main(["init", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert report["columns"]["item"] == "item"
    assert any("an id that is not UTF-8" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("name", "content", "remark_pattern"),
    [
        ("part-00000", "parquet", "is Parquet by its first bytes: rename it"),
        ("clicks.csv", "parquet", "is Parquet by its first bytes: rename it"),
        ("clicks.csv", "gzip", r"is compressed with gzip .* rename it to end in \.gz"),
        ("clicks.csv.gz", "plain", "not compressed with gzip, as its name says"),
        ("clicks.log", "plain", r"looks like rows with ',' between their fields: rename it to \.csv"),
        ("clicks.csv.20231114", "plain", r"rename it to \.csv"),
        ("ratings.dat", "colons", "fields between double colons"),
        ("reviews.ndjson.gz", "plain", "JSON is not read"),
        ("reviews.csv", "json", "looks like JSON"),
        ("reviews.txt", "json", "looks like JSON"),
        ("clicks.csv", "caret", "has one column, 'user\\^item\\^timestamp'.*separator"),
        ("clicks.csv", "utf-16-le", "zero bytes in its first line.*iconv"),
        ("clicks.csv", "utf-32", "is UTF-32: convert it"),
        ("clicks.csv", "web page", "is a page of HTML"),
        ("notes.md", "words", "its name does not say its format"),
        ("clicks.csv", "quoted header", "a quote in its line of column names that is not closed"),
        ("clicks.csv", "title", "or a line above the column names"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_taken_is_reported_by_its_content(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, remark_pattern: str
) -> None:
    write_csv(here / name, clicks_of(60))
    text = (here / name).read_text()
    contents = {
        "plain": text.encode(),
        "gzip": gzip.compress(text.encode()),
        "colons": text.replace(",", "::").encode(),
        "json": b'{"user": "u1", "item": "i1"}\n' * 60,
        "caret": text.replace(",", "^").encode(),
        "utf-16-le": text.encode("utf-16-le"),
        "utf-32": text.encode("utf-32"),
        "web page": b"<!DOCTYPE html>\n<html><body>Not found</body></html>\n",
        "words": b"What this folder is for\n",
        "quoted header": b'user,"item\nu1,i1\n',
        "title": b"Clicks of November\n" + text.encode(),
    }
    if content == "parquet":
        write_parquet(here / name, clicks_of(60))
    else:
        (here / name).write_bytes(contents[content])

    report = init(capsys, code=3)

    assert [note for note in report["notes"] if note.startswith(name)], report["notes"]
    assert re.search(remark_pattern, " ".join(report["notes"])), report["notes"]


def test_blanks_before_the_quotes_of_names_are_skipped_as_a_night_does(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f'"u{row % 40}", "i{row}", "17000000{row}"\n' for row in range(10, 99))
    (here / "a.csv").write_text('"user", "item", "timestamp"\n' + rows)

    report = init(capsys)

    assert report["columns"] == {
        "user": "user", "item": "item", "timestamp": "timestamp", "weight": None
    }  # fmt: skip


def test_files_with_the_columns_in_another_order_are_one_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = range(60)
    (here / "a.csv").write_text("user,item\n" + "".join(f"u{row % 9},i{row}\n" for row in rows))
    (here / "b.csv").write_text("item,user\n" + "".join(f"i{row},u{row % 9}\n" for row in rows))

    assert init(capsys)["interactions"] == ["*.csv"]


def test_data_of_another_format_next_to_a_table_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(here / "a.csv", clicks_of(60))
    for name in ("b.csv.zst", "c.jsonl", "package.json"):
        (here / name).write_bytes(b"{}")

    report = init(capsys)

    assert [note.split()[0] for note in report["notes"]] == ["b.csv.zst", "c.jsonl"]


def test_fields_between_signs_of_hive_are_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(here / "a.csv", clicks_of(60))
    (here / "a.csv").write_text((here / "a.csv").read_text().replace(",", "\x01"))

    init(capsys)

    config = night_config("larder.toml", {})
    (batch,) = read_interactions(config.sources, config.path("."))
    assert len(batch.user_ids) == 60


def test_two_byte_order_marks_are_skipped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(here / "a.csv", clicks_of(60))
    (here / "a.csv").write_text("\ufeff\ufeff" + (here / "a.csv").read_text())

    assert init(capsys)["columns"]["user"] == "user"
    config = night_config("larder.toml", {})
    (batch,) = read_interactions(config.sources, config.path("."))
    assert len(batch.user_ids) == 60


def test_times_that_mean_never_cost_no_column_of_times(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clicks = clicks_of(60)
    clicks["timestamp"][7] = 253_402_300_799
    write_csv(here / "a.csv", clicks)

    assert init(capsys)["columns"]["timestamp"] == "timestamp"


def test_times_of_another_unit_and_a_placeholder_id_are_reported(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks = clicks_of(60)
    clicks["timestamp"] = [472_222 + number for number in range(60)]
    clicks["item"] = ["-" if number % 4 == 0 else f"i{number}" for number in range(60)]
    write_csv(here / "a.csv", clicks)

    notes_text = " ".join(init(capsys)["notes"])

    assert "the newest time is 1970" in notes_text and "the item '-' has 25% of all rows" in notes_text


def test_interactions_that_a_night_refuses_end_init_with_a_problem(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "a.csv").write_text('user,item\n1,"2\n3,4\n5,6\n')

    report = init(capsys, code=3)

    assert any("a night refuses the interactions: a.csv, line 2: a quote is not closed" in n for n in report["notes"])
