"""New items of a catalogue that is a table of vectors: sent with a vector, answered with, and taken over."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.config.events import EventsConfig
from cache.config.night import DEFAULT_BUNDLE
from precompute.config.settings import NightConfig, TableConfig
from precompute.steps import take_events
from tests.integration.attributes.test_night import FIRST, SECOND
from tests.integration.changed.worlds import LENIENT
from tests.integration.fresh.test_new_items import lists, live_of, new_in, send, wait_for_live
from tests.integration.nights import histories, prepare, publish_night
from tests.integration.serving_app import eventually, serving

DIMS = 12


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    prepared_config = prepare(tmp_path, redis_url, users=80, items=40)
    items = pq.read_table(tmp_path / "items.parquet")["item"].to_pylist()
    rng = np.random.default_rng(5)
    vectors = rng.standard_normal((len(items), DIMS)).astype(np.float32)
    table = {"item": items, "vector": pa.array(vectors.tolist(), pa.list_(pa.float32()))}
    pq.write_table(pa.table(table), tmp_path / "vectors.parquet")
    sources = replace(prepared_config.sources, item_vectors="vectors.parquet", item_attributes=("category",))
    tables = {name: TableConfig(name, k=10) for name in ("user_topk", "user_vector")}
    return replace(
        prepared_config, bundle=DEFAULT_BUNDLE, sources=sources, tables=tables, gates=LENIENT,
        events=EventsConfig(enabled=True),
    )  # fmt: skip


async def test_a_vector_is_answered_with_and_becomes_a_row_of_the_table(config: NightConfig) -> None:
    publish_night(config, FIRST)
    history_by_user = histories(config, FIRST)
    users, items = (
        sorted(history_by_user)[:30],
        sorted({item for history in history_by_user.values() for item in history}),
    )
    rng = np.random.default_rng(6)
    new = [
        {
            "id": f"n{at}", "item": f"new-{at}", "vector": (2 * rng.standard_normal(DIMS)).tolist(),
            "attributes": {"category": "brand-new" if at % 2 else "other"},
        }
        for at in range(4)
    ]  # fmt: skip
    only_new = {"==": ["category", "brand-new"]}
    async with serving(config, events=config.events) as app:
        refused = await send(app, [
            {"id": "1", "item": "new-9", "vector": [1.0]},
            {"id": "2", "item": "new-9", "features": {"category": "x"}},
            {"id": "3", "item": "new-9", "vector": [1e13] * DIMS},
        ])  # fmt: skip
        assert [rejection["reason"] for rejection in refused["rejected"]] == ["unfit_item"] * 3
        assert "12 numbers, not 1" in refused["rejected"][0]["detail"]
        assert (await send(app, new))["accepted"] == 4
        await wait_for_live(app, lambda live: len(live.new_items) == 4)
        clicks = [{"id": f"c{at}", "user": user, "item": items[at]} for at, user in enumerate(users)]
        await send(app, clicks)

        async def all_count() -> bool:
            return all("events" in answer for answer in await lists(app, users))

        assert await eventually(all_count)
        day = await lists(app, users)
        assert not any(answer.get("approximate") for answer in day)
        await send(app, [{"id": "late", "user": users[-1], "item": "new-0"}])

        async def is_heard() -> bool:
            return (await lists(app, users[-1:]))[0].get("events") == 2

        assert await eventually(is_heard)
        day = await lists(app, users)
        # The next night's model knows the item; this night's does not.
        assert [at for at, answer in enumerate(day) if answer.get("approximate")] == [len(users) - 1]
        (filtered,) = await lists(app, users[:1], filter=only_new)
        assert set(filtered["items"]) == {"new-1", "new-3"} and filtered["short"]

        take_events.run(config)
        second = publish_night(config, SECOND)
        await wait_for_live(app, lambda live: live.generation == second)
        live = live_of(app)
        assert len(live.new_items) == 0 and live.items.count == 44
        night = await lists(app, users)
        (of_night,) = await lists(app, users[:1], filter=only_new)

    assert all(answer["producer"] == "live" for answer in day)
    assert sum(bool(new_in(answer)) for answer in day) > 10
    assert of_night["items"] == filtered["items"]
    shared = [len({*day_answer["items"]} & {*theirs["items"]}) for day_answer, theirs in zip(day, night, strict=True)]
    assert np.mean(shared) >= 9  # the fold of histories is chosen anew, over all items
    has_same_new_items = [new_in(day_answer) == new_in(theirs) for day_answer, theirs in zip(day, night, strict=True)]
    assert np.mean(has_same_new_items) > 0.8
