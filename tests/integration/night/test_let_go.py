"""A generation that is no longer held goes at once: the collector of cycles passes over what a flip has frozen."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.format.item_table import ItemTable
from cache.model.predictor import Predictor
from precompute.config.settings import NightConfig
from serving.engine import inference
from serving.generations.snapshot import Snapshot
from tests.integration.nights import NEXT, build_night, build_verified, histories, publish, roll_back
from tests.integration.serving_app import Running, eventually, serving


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(generations: set[str]) -> list[str]:
    """The generations of all snapshots that are still in memory."""
    snapshot_generations = [instance.generation for instance in gc.get_objects() if type(instance) is Snapshot]
    return sorted(generation for generation in snapshot_generations if generation in generations)


def count(kind: type) -> int:
    return sum(type(instance) is kind for instance in gc.get_objects())


async def request_every_rung(app: Running, night: NightConfig) -> None:
    """Something from every rung: stored, live, an input of which nothing can be used, a model that fails."""
    users, history = zip(*sorted(histories(night).items())[:5], strict=True)
    for entities in (
        [{"id": user} for user in users],
        [{"id": "new", "history": history[0][:4]}, {"id": "newer", "history": ["no-such-item"]}],
        [{"id": "newest", "history": history[1][:4]}],
    ):
        await app.post("/v1/lookup/user_topk", {"entities": entities, "k": 10})
    response = await app.http.get("/v1/lookup/user_topk/u", params={"generation": "no-such"})
    assert response.status_code == 409


@pytest.mark.parametrize("is_broken", [False, True])
async def test_nothing_keeps_a_generation_that_is_no_longer_held(
    tmp_path: Path, redis_url: str, no_collection: None, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    night = await asyncio.to_thread(build_night, tmp_path / "night", redis_url, users=80, items=40)
    coming = await asyncio.to_thread(build_verified, night, NEXT)
    generations = set(night.store().names("generations"))
    real, tables = Predictor.predict, count(ItemTable)

    def predict(self: Predictor, *arguments: Any, **named: Any) -> Any:
        if is_broken and threading.current_thread().name.startswith("larder-live"):
            raise RuntimeError("broken")
        return real(self, *arguments, **named)

    monkeypatch.setattr(Predictor, "predict", predict)
    monkeypatch.setattr(inference.log, "disabled", True)  # pytest keeps what is logged, tracebacks too
    async with serving(night) as app:

        def live() -> str:
            served = app.service.follower.served
            assert served is not None
            return served.live.generation

        async def only_what_is_held() -> bool:
            served = app.service.follower.served
            assert served is not None
            return alive(generations) == sorted(served.generations) and count(ItemTable) - tables == len(
                served.generations
            )

        await request_every_rung(app, night)
        for is_forward in (True, False, True):
            generation_before = live()
            if is_forward:
                await asyncio.to_thread(publish, night, coming, verify_again=True)
            else:
                await asyncio.to_thread(roll_back, night)

            async def flipped(generation_before: str = generation_before) -> bool:
                return live() != generation_before

            assert await eventually(flipped)
            await request_every_rung(app, night)
            assert await eventually(only_what_is_held), alive(generations)
