"""Users who brought a vector along are told apart: the lists of all others are computed from newer events."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cache.events.seen import SeenItems
from cache.format.directory import Directory
from cache.format.ids import hash_id
from precompute.config.settings import NightConfig
from tests.integration.changed.month import Month, scored
from tests.integration.changed.worlds import WORLDS
from tests.integration.serving_app import eventually, serving
from tests.integration.taking.clicking import click, some, taken, with_events
from tests.opened import open_generation


@pytest.fixture
def month(tmp_path: Path, redis_url: str, seed: int) -> Month:
    """Month in which every other user brings a vector."""
    made = WORLDS["vectors"](tmp_path / "night", redis_url, seed, users=120, items=90)
    return with_events(made, redis_url)


def with_vector(config: NightConfig) -> set[str]:
    return set(pq.read_table(config.path("user_vectors.parquet"))["user"].to_pylist())


def told_apart(config: NightConfig, generation: str, users: list[str]) -> dict[str, bool]:
    """Users whom the generation knows, and of whom it says that they brought one."""
    manifest, root = open_generation(config.store(), generation)
    directory = Directory.open(root, manifest.entity_sets["user"])
    seen = SeenItems.open(root, manifest, directory)
    assert seen is not None
    places = {each: directory.find(hash_id(each.encode(), directory.seed)) for each in users}
    return {each: seen.brought_vector(place) for each, place in places.items() if place >= 0}


def test_nights_say_who_brought_a_vector_and_copies_say_the_same(month: Month) -> None:
    for number in range(2):
        month.night = number
        click(month.config, some(month, f"n{number}", 12))
        full = taken(month.full)
        generation = month.publish()

        assert month.differences(generation, scored(full, month.cut)) == []
        found = told_apart(month.config, generation, month.ids("user"))
        brought = with_vector(month.config)
        assert found == {each: each in brought for each in found} and {*found.values()} == {
            True,
            False,
        }
    assert month.reasons(generation)["copied"] > 0


async def test_lists_of_those_without_are_those_of_the_next_night(month: Month) -> None:
    generation = month.publish()
    users = month.ids("user")
    brought = with_vector(month.config)
    known = told_apart(month.config, generation, users)
    ours = [each for each in known if each not in brought][:5]
    theirs = [each for each in known if each in brought][:5]
    async with serving(
        month.config, events=month.config.events, events_url=month.config.events_url
    ) as app:
        path = "/v1/lookup/user_topk"
        before = (await app.post(path, {"entities": theirs}))["answers"]
        events = [
            {"id": f"e-{user}", "user": user, "item": month.ids("item")[number]}
            for number, user in enumerate([*ours, *theirs])
        ]
        sent = await app.http.post("/v1/events", json={"events": events})
        assert sent.json()["accepted"] == len(events), sent.text

        async def all_count() -> bool:
            told = (await app.post(path, {"entities": [*ours, *theirs]}))["answers"]
            return all(each.get("events") == 1 for each in told)

        assert await eventually(all_count)
        day = (await app.post(path, {"entities": [*ours, *theirs]}))["answers"]
    month.night = 1
    taken(month.config)
    month.publish()
    async with serving(month.config) as app:
        night = (await app.post(path, {"entities": ours}))["answers"]

    assert ours and theirs
    for mine, next_ in zip(day[: len(ours)], night, strict=True):
        assert mine["producer"] == "live" and "approximate" not in mine
        assert mine["items"] == next_["items"]
    for mine, stored, event in zip(day[len(ours) :], before, events[len(ours) :], strict=True):
        assert mine["approximate"] is True and mine["producer"] == "batch"
        assert mine["items"] == [each for each in stored["items"] if each != event["item"]]
