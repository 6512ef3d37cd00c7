"""Near-match reuse through the whole service: lists and values, real models, Redis and HTTP."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.config.serving import NearConfig
from cache.store.blocklist import Blocklist
from precompute.bundles.bundle import Bundle, write_bundle
from precompute.config.settings import NightConfig, TableConfig
from serving.client import AsyncClient, Entity
from tests.integration.feature_towers import DIMS, from_history_and_country, from_looks, from_mood, vectors_column
from tests.integration.nights import NEXT, histories, prepare, publish_night
from tests.integration.serving_app import BASE, Running, serving

EAGER = {"user_topk": NearConfig(0.5, 0.5), "user_mood": NearConfig(0.5)}
"""Bounds that a few dozen samples show to hold."""


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    """A published night of lists from histories, and of moods from numbers."""
    folder: Path = tmp_path_factory.mktemp("near")
    config = prepare(folder, redis_url, users=300, items=1_500)
    users = sorted(histories(config))
    moods = np.random.default_rng(5).random((len(users), 2)).astype("f4").tolist()
    table = {
        "user": users, "country": pa.array([0] * len(users), pa.int64()),
        "mood": pa.array(moods, pa.list_(pa.float32())),
    }  # fmt: skip
    pq.write_table(pa.table(table), folder / "users.parquet")
    items = pq.read_table(folder / "items.parquet")["item"].to_pylist()
    item_columns = {"item": items, "looks": vectors_column(len(items), 3)}
    pq.write_table(pa.table(item_columns), folder / "items.parquet")
    ids = [raw.decode() for raw in Bundle.open(config.path(config.bundle)).item_ids]
    write_bundle(
        folder / "towers", name="near", version="1", dims=DIMS, item_ids=ids,
        user_tower=from_history_and_country(len(ids)), item_tower=from_looks(), values={"mood": from_mood()},
    )  # fmt: skip
    config = replace(
        config, bundle="towers", sources=replace(config.sources, user_features="users.parquet"),
        tables={"user_topk": TableConfig("user_topk", k=10), "user_mood": TableConfig("value", value="mood")},
    )  # fmt: skip
    publish_night(config, config.data_until or "2026-01-29T00:00:00Z")
    return config


@pytest.fixture
async def app(night: NightConfig) -> AsyncIterator[Running]:
    async with serving(night, near=EAGER) as running:
        yield running


class Strangers:
    """Inputs with unknown ids, each similar to one of a few."""

    def __init__(self, night: NightConfig, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._items = [raw.decode() for raw in Bundle.open(night.path(night.bundle)).item_ids]
        self._bases = [self._rng.choice(self._items, 40, replace=False).tolist() for _ in range(3)]
        self._count = 0
        self._name = uuid.uuid4().hex[:8]  # overlays of another test's strangers lie in Redis

    def _id(self) -> str:
        self._count += 1
        return f"stranger-{self._name}-{self._count}"

    def history(self) -> dict[str, Any]:
        """A history that differs by one item."""
        history = list(self._bases[self._rng.integers(3)])
        history[self._rng.integers(40)] = str(self._rng.choice(self._items))
        return {"id": self._id(), "history": list(dict.fromkeys(history)), "features": {"country": 0}}

    def mood(self) -> dict[str, Any]:
        """Numbers close to some."""
        mood = np.array([0.8, 0.2]) if self._rng.random() < 0.5 else np.array([0.1, 0.9])
        return {"id": self._id(), "features": {"mood": (mood + 0.01 * self._rng.random(2)).tolist()}}


async def get_answers(app: Running, table: str, entities: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """Answers, in order."""
    body = await app.post(f"/v1/lookup/{table}", {"entities": entities, **options})
    answers: list[dict[str, Any]] = body["answers"]
    return answers


async def until_near(app: Running, table: str, draw: Any, **options: Any) -> list[dict[str, Any]]:
    """Asks until answers are near ones; the pairs of what was sent and answered from then on."""
    answered_entities: list[dict[str, Any]] = []
    for _ in range(60):
        drawn_entities = [draw() for _ in range(16)]
        for entity, answer in zip(
            drawn_entities, await get_answers(app, table, drawn_entities, **options), strict=True
        ):
            if "near" in answer:
                answered_entities.append(entity | {"answer": answer})
        if len(answered_entities) > 40:
            break
    return answered_entities


async def test_lists_are_reused_marked_and_leave_out_what_they_must(app: Running, night: NightConfig) -> None:
    strangers = Strangers(night)
    excluded = (await get_answers(app, "user_topk", [strangers.history()]))[0]["items"][:2]

    near = await until_near(app, "user_topk", strangers.history, exclude=excluded)

    assert len(near) > 40
    for entity in near:
        answer = entity["answer"]
        assert answer["source"] == "live" and answer["producer"] == "live"
        assert 0 <= answer["near"] < 0.5 and answer["reason"] == "not_in_generation"
        assert not {*entity["history"], *excluded} & {*answer["items"]}
        assert answer["scores"] == sorted(answer["scores"], reverse=True)
    # A reused answer is not stored: a repeated request is computed or reused again.
    repeated_entity = {key: near[-1][key] for key in ("id", "history", "features")}
    assert (await get_answers(app, "user_topk", [repeated_entity]))[0]["source"] == "live"
    near_counts = await app.scrape_samples("larder_near_inputs_total")
    assert near_counts["reuse", "user_topk"] >= len(near)
    assert (await app.scrape_samples("larder_near_reusing"))["both", "user_topk"] == 1
    error = await app.scrape_samples("larder_near_error_ratio")
    assert error["highest", "both", "user_topk"] >= error["lowest", "both", "user_topk"]
    assert (await app.scrape_samples("larder_near_off"))["both", "user_topk"] == 0


async def test_values_are_reused_and_the_client_and_arrow_have_the_mark(app: Running, night: NightConfig) -> None:
    strangers = Strangers(night)

    near = await until_near(app, "user_mood", strangers.mood)

    assert len(near) > 40
    for entity in near:
        first = int(np.argmax(entity["features"]["mood"]))
        assert int(np.argmax(entity["answer"]["values"])) == first
    for binary in (False, True):  # JSON, and Arrow
        client = AsyncClient(BASE, transport=app.http._transport, binary=binary)
        near_distances: list[float | None] = []
        for _ in range(20):  # which ones are computed all the same is drawn: of sixty it may be none
            drawn_entities = [strangers.mood() for _ in range(60)]
            entities = [Entity(entity["id"], features=entity["features"]) for entity in drawn_entities]
            near_distances += [answer.near for answer in await client.lookup_many("user_mood", entities)]
            if None in near_distances:
                break
        assert None in near_distances and any(
            distance is not None and 0 <= distance < 0.5 for distance in near_distances
        )


async def test_known_ids_fresh_answers_and_filters_are_never_near(app: Running, night: NightConfig) -> None:
    strangers = Strangers(night)
    assert await until_near(app, "user_topk", strangers.history)
    known_users = sorted(histories(night))[:16]

    drawn_entities = [strangers.history() | {"id": user} for user in known_users]
    of_known = await get_answers(app, "user_topk", drawn_entities, fresh=True)
    fresh = await get_answers(app, "user_topk", [strangers.history() for _ in range(16)], fresh=True)

    assert {answer["source"] for answer in (*of_known, *fresh)} == {"live"}
    assert not [answer for answer in (*of_known, *fresh) if "near" in answer]


async def test_what_is_blocked_meanwhile_is_in_no_near_answer(app: Running, night: NightConfig) -> None:
    strangers = Strangers(night)
    near = await until_near(app, "user_topk", strangers.history)
    blocked_items = {item for entity in near for item in entity["answer"]["items"][:3]}

    blocklist = Blocklist(10, frozenset(item.encode() for item in blocked_items))
    await app.service.follower.holder.put_own_blocklist_in_force(blocklist)
    after = await until_near(app, "user_topk", strangers.history)

    assert len(after) > 40 and all(len(entity["answer"]["items"]) == 10 for entity in after)
    assert not blocked_items & {item for entity in after for item in entity["answer"]["items"]}


async def test_off_there_is_no_mark_and_nothing_is_counted(night: NightConfig) -> None:
    async with serving(night) as app:
        strangers = Strangers(night)
        answers = await get_answers(app, "user_topk", [strangers.history() for _ in range(100)])

        assert {answer["source"] for answer in answers} == {"live"}
        assert not [answer for answer in answers if "near" in answer]
        assert not await app.scrape_samples("larder_near_inputs_total")


async def test_another_generation_starts_from_nothing(app: Running, night: NightConfig) -> None:
    strangers = Strangers(night)
    assert await until_near(app, "user_topk", strangers.history)

    generation = await asyncio.to_thread(publish_night, night, NEXT)
    for _ in range(100):
        answer = (await get_answers(app, "user_topk", [strangers.history()]))[0]
        if answer["generation"] == generation:
            break
        await asyncio.sleep(0.1)
    assert answer["generation"] == generation
    first = await get_answers(app, "user_topk", [strangers.history() for _ in range(8)])

    assert "near" not in answer and not [first_answer for first_answer in first if "near" in first_answer]
    assert await until_near(app, "user_topk", strangers.history)
