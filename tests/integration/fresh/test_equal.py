"""Answers with newer events equal the lists of a night over the same rows, made here from the rows themselves."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.events.event import Event
from tests.integration.feature_towers import COUNTRIES, from_history_and_country, with_towers
from tests.integration.fresh.events_world import EVENTS, EventWorld, same_list, until_counted
from tests.integration.nights import prepare
from tests.integration.serving_app import Running, serving

LIMIT = 12
QUIET = tuple(f"quiet-{number}" for number in range(8))
"""Users of the feature table without any row of their own."""
BATCH = 100
DEADLINE_MS = 10_000.0
"""For a batch on a busy machine: what is compared is lists, not times."""


def reference_world(folder: Path, redis_url: str, users: int) -> EventWorld:
    """A world of the reference bundle, whose models are given the newest few items."""
    config = prepare(folder, redis_url, users=users, items=150)
    return EventWorld(replace(config, history_limit=LIMIT), limit=LIMIT)


def feature_world(folder: Path, redis_url: str, users: int) -> EventWorld:
    """A world whose user tower takes a country besides."""
    config = prepare(folder, redis_url, users=users, items=150)
    world = EventWorld(config)
    names = [*QUIET, *world.users]
    countries = np.random.default_rng(3).integers(COUNTRIES, size=len(names)).tolist()
    table = {"user": names, "country": pa.array(countries, pa.int64())}
    pq.write_table(pa.table(table), folder / "users.parquet")
    item_columns = {"item": world.items, "looks": looks_of(len(world.items))}
    pq.write_table(pa.table(item_columns), folder / "items.parquet")
    with_towers(config, from_history_and_country)
    sources = replace(config.sources, user_features="users.parquet")
    tables = {"user_topk": config.tables["user_topk"], "user_vector": config.tables["user_vector"]}
    features = {user: {"country": country} for user, country in zip(names, countries, strict=True)}
    return EventWorld(replace(config, sources=sources, tables=tables), features=features)


def looks_of(count: int) -> Any:
    values = np.random.default_rng(4).standard_normal((count, 16)).astype(np.float32)
    return pa.array(values.tolist(), pa.list_(pa.float32()))


def drawn(world: EventWorld, rng: np.random.Generator, user: str, user_rows: list[tuple[str, int]]) -> list[Event]:
    """1 to 50 events: repeats of what the user had, late ones, ties, unknown items, and some that count for nothing."""
    events = []
    for _ in range(int(rng.integers(1, 51))):
        item = user_rows[rng.integers(len(user_rows))][0] if rng.random() < 0.3 else str(rng.choice(world.items))
        item = "nobody-knows" if rng.random() < 0.05 else item
        late = user_rows[rng.integers(len(user_rows))][1] if rng.random() < 0.4 else None
        weight = 0.0 if rng.random() < 0.05 else 1.0
        events.append(world.event(user, item, late, weight))
    rng.shuffle(events)
    return events


async def get_answers(app: Running, users: Sequence[str]) -> list[dict[str, Any]]:
    """Answers of all users, a batch at a time."""
    answers: list[dict[str, Any]] = []
    for start in range(0, len(users), BATCH):
        body = {"entities": list(users[start : start + BATCH])}
        answers += (await app.post("/v1/lookup/user_topk", body))["answers"]
    return answers


async def compare(world: EventWorld, generation: str, count: int) -> None:
    """Look up all users, with events and without, and compare."""
    rng = np.random.default_rng(7)
    quiet = [user for user in QUIET if user in world.features]
    users = [*quiet, *(user for user in world.users if rng.random() < 0.9)][:count]
    rows_by_user = defaultdict[str, list[tuple[str, int]]](list)
    for user, item, at_us in world.rows:
        rows_by_user[user].append((item, at_us))
    for user in quiet:
        rows_by_user[user] = [(world.items[0], world.rows[0][2])]
    for start in range(0, len(users), 50):
        batch_users = users[start : start + 50]
        world.accept(
            [drawn_event for user in batch_users for drawn_event in drawn(world, rng, user, rows_by_user[user])]
        )
    numbers = dict.fromkeys(users, 0)
    for _, event in world.accepted:
        numbers[str(event.user and event.user.decode())] += event.is_in_history
    with_events = [user for user in users if numbers[user]]
    expected = world.expected(generation, with_events)

    async with serving(world.config, events=EVENTS, live_queue=10_000, deadline_ms=DEADLINE_MS) as app:
        await until_counted(app, world)
        first, repeated_answers = (await get_answers(app, with_events), await get_answers(app, with_events))
        stored_batch = await app.post("/v1/lookup/user_topk", {"entities": world.known_users[:20], "max_events": 0})

    approximate = sum("approximate" in answer for answer in first)
    print(f"{approximate} of {len(first)} answers with {len(world.accepted)} events are approximate")
    for user, answer in zip(with_events, first, strict=True):
        assert (answer["source"], answer["producer"]) == ("live", "live")
        assert "approximate" not in answer and answer["reason"] == "newer_events"
        assert answer["events"] == numbers[user]
        assert same_list(answer, *expected[user]), user
    for first_answer, after in zip(first, repeated_answers, strict=True):
        assert after["source"] == "l1" and after["items"] == first_answer["items"]
        assert after["scores"] == first_answer["scores"] and after["as_of"] == first_answer["as_of"]
    for answer in stored_batch["answers"]:
        assert answer["producer"] == "batch" and "events" not in answer


@pytest.mark.parametrize("make_world", [reference_world, feature_world])
async def test_answers_are_the_lists_of_a_night(make_world: Any, tmp_path: Path, redis_url: str) -> None:
    world = make_world(tmp_path, redis_url, 200)
    await compare(world, world.publish(), 120)


@pytest.mark.storm
@pytest.mark.parametrize("make_world", [reference_world, feature_world])
async def test_ten_thousand_answers_are_the_lists_of_a_night(make_world: Any, tmp_path: Path, redis_url: str) -> None:
    world = make_world(tmp_path, redis_url, 11_500)
    await compare(world, world.publish(), 10_000)
