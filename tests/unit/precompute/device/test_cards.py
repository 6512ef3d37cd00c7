"""The table of measured GPUs: it is what their benches left, and predicts them; no other card is guessed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cache.errors import ConfigError
from precompute.planning.cards import CARDS, Card, ListCost, find_card
from precompute.planning.options import quick_answer
from tests.bench.device.card_table import CASES, RESULTS, main, measured_cards

CLOSE = 0.15
"""How far a prediction may be from what was run."""
LINE = ("--users", "400000", "--items", "1000000", "--dims", "128")


def results(bench: str, name: str) -> dict[str, Any]:
    """What a bench on a card left."""
    bench_results: dict[str, Any] = json.loads((RESULTS / f"{bench}-{name}.json").read_text())
    return bench_results


def test_the_table_is_what_the_benches_found() -> None:
    assert measured_cards() == CARDS


def test_the_table_is_printed_as_it_stands_in_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    main()

    names: dict[str, Any] = {}
    exec(  # noqa: S102 - what the line printed
        capsys.readouterr().out, {"Mapping": dict, **vars(sys.modules["precompute.planning.cards"])}, names
    )
    assert names["CARDS"] == CARDS


@pytest.mark.parametrize("name", sorted(CARDS))
@pytest.mark.parametrize(("dims", "case"), CASES.items())
def test_lists_are_predicted_as_the_bench_made_them(name: str, dims: int, case: str) -> None:
    figures = results("gpu", name)["figures"]
    users = figures[f"{case}_users"]
    runs = {figures[f"{case}_items"]: figures[f"{case}_users_per_s"]}
    if (tenth := figures.get(f"{case}_tenth_users_per_s")) is not None:
        runs[figures[f"{case}_items"] // 10] = tenth
    for items, rate in runs.items():
        predicted_s = CARDS[name].forecast_night(users, items, dims, 100).topk_s

        assert predicted_s == pytest.approx(users / rate, rel=CLOSE)


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if card.shard_cost])
def test_a_night_up_to_its_pages_is_predicted_as_its_bench_ran_it(name: str) -> None:
    bench_results = results("shard", name)
    figures, (row,) = bench_results["figures"], bench_results["rows"].values()
    users = figures["users"]

    night = CARDS[name].forecast_night(users, figures["items"], figures["dims"], 100)

    assert night.topk_s == pytest.approx(users / row["baseline"], rel=CLOSE)
    pages_s = users / row["candidate"]
    assert night.pages_s == pytest.approx(pages_s, rel=CLOSE)
    ran_s = figures["begin_s"] + figures["embed_s"] + pages_s
    assert night.night_s == pytest.approx(ran_s, rel=CLOSE)


def test_lists_limit_the_pages_where_they_take_longer() -> None:
    night = CARDS["h200"].forecast_night(1_000_000, 50_000_000, 128, 100)

    assert night.pages_s == night.topk_s


def test_a_card_without_a_bench_of_shards_says_only_what_lists_take() -> None:
    card = Card("card", (ListCost(128, 1_000_000, 0.8), ListCost(256, 500_000, 0.8)))

    night = card.forecast_night(2_000_000, 1_000_000, 192, 100)

    assert night.topk_s == pytest.approx(3.0) and night.users_per_s == pytest.approx(2e6 / 3)
    assert night.begin_s is night.embed_s is night.pages_s is night.night_s is None
    assert night.notes == ("one card did 1,000,000 users/s with 1,000,000 items of 128, K = 100",)


def test_what_was_not_measured_is_named() -> None:
    notes = "\n".join(CARDS["h200"].forecast_night(1000, 2_000_000, 512, 50).notes)

    for part in ("lists of 50 were not", "512 dimensions were not measured", "2,000,000 items are extrap"):
        assert part in notes


def test_a_card_is_found_by_its_name_and_others_are_refused_with_the_known_ones() -> None:
    card = CARDS["h200"]
    cards_by_name = {"h200": card, "h100-80gb-hbm3": card, "rtx-5090": card, "rtx-5080": card}

    assert find_card("NVIDIA H200") is find_card("h200") is card
    assert find_card("h100", cards_by_name) is card
    for name in ("rtx", "h20", ""):
        with pytest.raises(ConfigError, match="measured were h100-80gb-hbm3, h200, rtx-5080"):
            find_card(name, cards_by_name)


def test_a_line_with_all_numbers_is_answered_before_any_library_is_loaded() -> None:
    code = (
        "import sys\nfrom infra.cli.__main__ import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'numpy', 'torch', 'faiss', 'pyarrow', 'pydantic', 'redis', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    command = [sys.executable, "-c", code, "plan", "--card", "h200", *LINE, "--json"]

    completed_process = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[4]
    )

    assert completed_process.returncode == 0, completed_process.stderr
    plan = json.loads(completed_process.stdout)
    assert plan["topk_s"] == CARDS["h200"].forecast_night(400_000, 1_000_000, 128, 100).topk_s
    assert plan["card"] == "NVIDIA H200" and plan["night_s"] > plan["pages_s"] >= plan["topk_s"]


def test_a_table_for_people_names_every_step() -> None:
    plan_text = str(quick_answer(["--card", "h200", *LINE]))

    for part in ("lists", "begin", "item vectors", "partition to pages", "sources to pages"):
        assert f"\n  {part}" in plan_text


@pytest.mark.parametrize(
    "line",
    [
        LINE,
        ("--card", "h200", "--users", "5"),
        ("--card", "h9000", *LINE),
        ("--card", "h200", *LINE, "--users", "0"),
        ("--card", "h200", *LINE, "--k", "many"),
        ("--card", "h200", *LINE, "--qps", "5"),
        ("--card",),
    ],
)
def test_any_other_line_is_left_to_the_whole_parser(line: tuple[str, ...]) -> None:
    assert quick_answer(line) is None
