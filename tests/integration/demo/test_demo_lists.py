"""The demo's measure reads its lists through the client: what it sees is what the service counted."""

from pathlib import Path

import httpx

from infra.demo.checks import Judge, metric_contradictions
from infra.demo.evaluate import LIST_LENGTH, offline_lists, served_lists
from tests.integration.fleet import fleet
from tests.integration.nights import build_night, histories, top_lists


def test_served_lists_are_the_nights_own_looked_up_once_and_judged(tmp_path: Path, redis_url: str) -> None:
    config = build_night(tmp_path / "night", redis_url, users=200, items=60)
    history_by_user = histories(config)
    users, judge = sorted(history_by_user)[:40], Judge(history_by_user=history_by_user)

    with fleet(config, tmp_path / "logs", count=1) as (service,):
        served = served_lists(service.url, users, judge)
        metrics = httpx.get(f"{service.url}/metrics").text

    (generation,) = judge.answers_by_generation
    expected = top_lists(config, generation, users)
    assert served == {user: expected[user][:LIST_LENGTH] for user in users}
    assert judge.violations == [] and metric_contradictions(metrics, judge.answers_by_source) == []
    assert judge.request_count == 1 and judge.answers_by_source.total() == len(users)


def test_the_measure_apart_from_larder_finds_the_nights_lists_of_the_reference_bundle(
    tmp_path: Path, redis_url: str
) -> None:
    config = build_night(tmp_path / "night", redis_url, users=200, items=60)
    history_by_user = histories(config)
    users = sorted(history_by_user)[:40]

    offline = offline_lists(config.path(config.bundle), history_by_user, users)

    (generation,) = [
        generation_id for generation_id in config.store().names("generations") if not generation_id.startswith(".")
    ]
    served = top_lists(config, generation, users)
    assert offline == {user: list(served[user][:LIST_LENGTH]) for user in users}
