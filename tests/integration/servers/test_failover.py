"""A primary killed under load: answers go on, the service follows, a night publishes to the next primary."""

import contextlib
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.integration.balanced.pods import Load
from tests.integration.nights import (
    DATA_UNTIL,
    NEXT,
    build_verified,
    histories,
    prepare,
    publish,
    publish_night,
    top_lists,
)
from tests.integration.ordeal import AnswerJudge
from tests.integration.program import environment, started
from tests.integration.servers.watched import WatchedPair, WatchedServer, watched_pair
from tests.polling import poll_until

SEED = 26


def failed_over(pair: WatchedPair, load: Load) -> WatchedServer:
    """The primary, killed under load, once the service reads pages of the other one."""
    dead = pair.primary()
    dead.kill()
    assert load.wait_for_requests(30)
    assert poll_until(lambda: pair.primary() is not dead, 60)
    l2_count_before = load.answer_judge.sources["l2"]
    assert poll_until(lambda: load.answer_judge.sources["l2"] > l2_count_before + 5, 60)
    return dead


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.storm)])
def test_a_killed_primary_costs_no_answer_and_the_next_one_is_followed(tmp_path: Path, times: int) -> None:
    night = prepare(tmp_path / "night", "redis://nowhere", users=100, items=60)
    with watched_pair(tmp_path / "redis", night.namespace) as pair, contextlib.ExitStack() as stack:
        config = replace(night, redis_url=pair.url("larder-loader"))
        live = publish_night(config, DATA_UNTIL)
        users = sorted(histories(config))
        items = sorted({item for history in histories(config).values() for item in history})
        lists = {live: top_lists(config, live, users)}
        answer_judge = AnswerJudge(lists, users, items, np.random.default_rng(SEED))
        environ = environment(
            config, tmp_path / "state", REDIS_URL=pair.url("larder-reader"), LARDER_L1_BYTES="16384",
            LARDER_QUEUE_TARGET_MS="2000",
        )  # fmt: skip
        _, url = stack.enter_context(started(environ, tmp_path / "log"))
        load = stack.enter_context(Load(url, answer_judge).going_on())
        assert poll_until(lambda: answer_judge.sources["l2"] > 5, 60)

        dead = failed_over(pair, load)
        assert load.wait_for_requests(30)
        if times > 1:
            later = build_verified(config, NEXT)
            lists[later] = top_lists(config, later, users)
            publish(config, later)
            assert poll_until(lambda: httpx.get(f"{url}/readyz").json()["generation"] == later, 60)
            dead.start()  # empty: it was a primary without persistence
            assert poll_until(pair.is_whole, 60)
            failed_over(pair, load)

        print(f"{answer_judge.requests} requests: {dict(answer_judge.sources)}")
        assert answer_judge.wrong == []
