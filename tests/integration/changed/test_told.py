"""What is told of nights that copy: the night's own table, `status`, the dashboard's history, the manifest."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cache.process.redis_server import RedisServer
from cache.reuse import REUSE_FACT, Reuse
from cache.store.artefacts import read_manifest
from precompute.cli.status import read_state, render_status, report_status
from precompute.steps.night import Night, run_night
from serving.dashboard.generation_history import GenerationHistory
from serving.generations.nights import ReleaseWatch
from tests.fakes import THREADS
from tests.integration.changed.month import Month
from tests.integration.nights import prepare


@pytest.fixture
def month(tmp_path: Path, own_redis: RedisServer) -> Month:
    config = prepare(tmp_path / "month", own_redis.url, users=200, items=80)
    return Month.of(config, own_redis.url, seed=3)


def night(month: Month, number: int) -> dict[str, str]:
    """Row of each step of a night's table."""
    month.night = number
    finished_steps = run_night(Night(month.config, f"test-{number}", month.cut.isoformat()))
    return {name: row.result_summary for name, row, _ in finished_steps}


def status_lines(month: Month) -> str:
    """Status as a terminal shows it, as one text without line breaks."""
    console = Console(width=400, file=io.StringIO())
    for renderable in render_status(report_status(month.config, read_state(month.config))):
        console.print(renderable)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_a_nights_table_says_what_was_copied_from_whom_and_why_others_were_not(month: Month) -> None:
    first = night(month, 0)
    generation = first["begin"].split()[0]
    assert "no copies: there is no verified generation to copy from" in first["begin"]
    assert "copied" not in first["score"] and "copied" not in first["embed_items"]

    month.night = 1
    month.a_day()
    second = night(month, 1)
    assert f")\ncopies from {generation}" in second["begin"]
    assert second["embed_items"].endswith(", 80 copied")
    assert "\nusers: " in second["score"] and " copied, " in second["score"]
    assert " for their inputs" in second["score"]

    month.shorten(1)
    third = night(month, 2)
    assert "; all files read: source files were changed, removed or inserted" in third["begin"]

    month.config = replace(month.config, reuse="off")
    assert "no copies: [night] reuse is off" in night(month, 3)["begin"]


def test_status_and_the_dashboard_tell_shares_reasons_seconds_and_the_last_nights(month: Month) -> None:
    first = night(month, 0)["begin"].split()[0]
    month.night = 1
    month.a_day()
    second = night(month, 1)["begin"].split()[0]
    fact = Reuse.of(read_manifest(month.config.store(), second).facts)
    assert fact is not None and fact.base_generation == first and len(fact.nights) == 2
    users = fact.night.user_count_by_reason
    expected_counts = {name: count for name, count in month.reasons(second).items() if count}
    assert {name: count for name, count in users.items() if count} == expected_counts
    copied = [
        read_manifest(month.config.store(), generation_id).facts[REUSE_FACT]["items"]
        for generation_id in (first, second)
    ]
    assert copied == [0, 2 * 80]  # no item changed: its vector and its list of similar ones
    assert users["inputs"] > 0 and fact.night.copied_share is not None and fact.night.copied_share > 0.8

    status_report = report_status(month.config, read_state(month.config))
    newest_generation, previous_generation = status_report["generations"][:2]
    assert newest_generation["reuse"] == fact.to_json()
    assert previous_generation["reuse"]["share"] == 0.0 and previous_generation["reuse"]["base"] is None
    text = status_lines(month)
    assert f"users of the live generation: {users['copied']:,} copied, " in text
    assert f"of the last 2 nights {fact.recent_total.copied_share:.1%} copied" in text
    assert f"{fact.night.copied_share:.1%}" in text and "s spared a night" in text

    store = month.config.store()
    history = GenerationHistory(store, ReleaseWatch(store, THREADS).read_records)
    nights = history.read_generations_and_nights(None)[1]
    assert [night_row["generation"] for night_row in nights] == [second, first]
    assert nights[0]["reuse"] == fact.to_json()
