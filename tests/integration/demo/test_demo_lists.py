"""The demo's measure reads its lists through the client: what it sees is what the service counted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.demo import evaluate
from infra.demo.checks import Judge, Question
from infra.demo.evaluate import TOP, offline_lists, served_lists
from infra.demo.http import scrape
from tests.integration.fleet import fleet
from tests.integration.nights import build_night, histories, top_lists


async def test_served_lists_are_the_nights_own_looked_up_once_and_judged(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "BATCH", 7)
    config = build_night(tmp_path / "night", redis_url, users=200, items=60)
    history_by_user = histories(config)
    users, judge = sorted(history_by_user)[:40], Judge(histories=history_by_user)

    def judged(answers: Sequence[Mapping[str, Any]]) -> None:
        judge.request(
            [Question("user_topk", str(answer["id"]), TOP) for answer in answers], answers
        )

    with fleet(config, tmp_path / "logs", count=1) as (service,):
        served = await served_lists(service.url, users, judged)
        counts = await scrape(service.url)

    (generation,) = judge.generations
    expected = top_lists(config, generation, users)
    assert {user: tuple(served.lists[user]) for user in users} == {
        user: expected[user][:TOP] for user in users
    }
    assert judge.violations == [] and counts.disagreements(judge.sources, judge.entities) == []
    assert judge.requests == 6


def test_the_measure_apart_from_larder_finds_the_nights_lists_of_the_reference_bundle(
    tmp_path: Path, redis_url: str
) -> None:
    config = build_night(tmp_path / "night", redis_url, users=200, items=60)
    history_by_user = histories(config)
    users = sorted(history_by_user)[:40]

    offline = offline_lists(config.path(config.bundle), history_by_user, users, lambda _count: None)

    (generation,) = [
        generation_id
        for generation_id in config.store().names("generations")
        if not generation_id.startswith(".")
    ]
    served = top_lists(config, generation, users)
    assert offline == {user: list(served[user][:TOP]) for user in users}
