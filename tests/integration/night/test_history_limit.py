"""Nights of which models are given the newest items of a history alone: live does the same."""

from dataclasses import replace
from pathlib import Path

from tests.integration import nights
from tests.integration.changed.worlds import LENIENT
from tests.integration.serving_app import serving

LIMIT = 3


async def test_live_answers_a_history_as_the_night_did_whatever_its_length(tmp_path: Path, redis_url: str) -> None:
    config = nights.prepare(tmp_path, redis_url, users=80, items=40)
    config = replace(config, gates=LENIENT, history_limit=LIMIT)
    nights.publish_night(config, nights.DATA_UNTIL)  # its gates compare both
    histories = nights.histories(config)
    users = [user for user in sorted(histories) if len(histories[user]) > LIMIT][:10]

    async with serving(config, precision="fp32") as app:
        path = "/v1/lookup/user_vector"
        stored_answers = (await app.post(path, {"entities": users}))["answers"]
        entities = [{"id": None, "history": histories[user]} for user in users]
        live = (await app.post(path, {"entities": entities}))["answers"]
        lists = (await app.post("/v1/lookup/user_topk", {"entities": entities}))["answers"]

    assert len(users) == 10
    for user, night, day, list_answer in zip(users, stored_answers, live, lists, strict=True):
        assert day["source"] == "live"
        assert max(abs(a - b) for a, b in zip(night["vector"], day["vector"], strict=True)) < 1e-3
        assert not {*histories[user]} & {*list_answer["items"]}
