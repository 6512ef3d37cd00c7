"""The command `erase` without Redis: who still holds an entity, for people and for programs."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.table import Table

from cache.errors import InvalidInput
from precompute.config.settings import NightConfig
from precompute.erasure.command import erase

G1, G2 = (f"2026010{day}T000000Z-{'0' * 11}{day}" for day in (1, 2))


@pytest.fixture
def config(tmp_path: Path) -> NightConfig:
    """Settings without a Redis, of a store with two generations that cannot be looked into."""
    config = replace(NightConfig(), artifacts=str(tmp_path), redis_url="")
    for generation in (G1, G2):
        config.store().write(f"generations/{generation}/manifest.json", b"damaged")
    return config


def make_arguments(**options: Any) -> Namespace:
    """Arguments of the command."""
    default_options = {
        "entity": None, "kind": "user", "forget": False, "reason": None, "status": False, "list": False,
        "gone": None, "json": False,
    }  # fmt: skip
    return Namespace(**default_options | options)


def run(config: NightConfig, **options: Any) -> Any:
    return erase(config, make_arguments(**options), cast(Any, None))


def test_programs_get_every_erasure_with_all_that_hold_it(config: NightConfig) -> None:
    report = run(config, entity="u1", json=True)

    (row,) = report["erasures"]
    assert (row["entity"], row["as"], row["stands"]) == ("u1", "user", "pending")
    assert row["done_at"] is None and row["reason"] == ""
    assert row["held_by"] == [{"holder": G1, "until": ""}, {"holder": G2, "until": ""}]
    assert report["overlays_dropped"] is None and report["notes"] == []


def test_people_get_a_line_for_every_holder_and_the_entity_once(config: NightConfig) -> None:
    table, summary = run(config, entity="u1")

    assert isinstance(table, Table)
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["u1", ""] and columns[3] == ["pending", ""]
    assert columns[4] == [G1, G2]
    assert summary == "1 pending, 0 done or forgotten"


def test_an_id_that_could_be_taken_for_another_is_quoted(config: NightConfig) -> None:
    table, _ = run(config, entity="a b")

    assert next(iter(table.columns[0].cells)) == "'a b'"


def test_only_the_entity_that_is_named_is_shown(config: NightConfig) -> None:
    run(config, entity="u1")
    run(config, entity="u1", kind="item")

    entity_erasures = run(config, entity="u1", status=True, json=True)["erasures"]
    all_erasures = run(config, list=True, json=True)["erasures"]

    assert [row["as"] for row in entity_erasures] == ["user"]
    assert [row["as"] for row in all_erasures] == ["user", "item"]
    assert run(config, entity="u2", status=True) == ["no such erasure"]


def test_a_command_without_an_entity_is_refused(config: NightConfig) -> None:
    with pytest.raises(InvalidInput, match="--list"):
        run(config)
