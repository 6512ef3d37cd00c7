"""The real application while an arm of an experiment loads for long."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from cache.store.blocklist import change_blocklist
from precompute.traffic import experiments
from precompute.traffic.experiments import ArmOption, ExperimentOption
from serving.replica.namespace import ServedNamespace
from tests.integration.experiments.arms import arms
from tests.integration.nights import histories
from tests.integration.serving_app import eventually, serving

LOADS_S = 1.5
load_at_once = ServedNamespace.start


def option(own_namespace: str, arm_namespace: str) -> ExperimentOption:
    """An experiment with an arm in another namespace."""
    named = (ArmOption("control", own_namespace, 0.5), ArmOption("b", arm_namespace, 0.5))
    return ExperimentOption(own_namespace, "ranker", named, 0.6)


class HeldStart:
    """Start of an arm that goes on once it may."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    def put_in_force(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hold every start of an arm from now on."""

        async def start(arm: ServedNamespace) -> None:
            self.has_begun.set()
            await self.may_end.wait()
            await load_at_once(arm)

        monkeypatch.setattr(ServedNamespace, "start", start)


async def test_what_is_blocked_while_an_arm_starts_is_in_none_of_its_answers(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_config, arm_config = arms(tmp_path, redis_url)
    user = min(histories(own_config))
    held_start = HeldStart()

    async with serving(own_config) as running:
        held_start.put_in_force(monkeypatch)
        experiment_option = option(own_config.namespace, arm_config.namespace)
        starting = asyncio.create_task(
            asyncio.to_thread(experiments.start, own_config, experiment_option, holdout_share=None)
        )
        await asyncio.wait_for(held_start.has_begun.wait(), 30)

        async def items(arm: str) -> list[str]:
            body = {"entities": [user], "arm": f"ranker={arm}"}
            answer = (await running.post("/v1/lookup/user_topk", body))["answers"][0]
            return list(answer["items"])

        (answer,) = (await running.post("/v1/lookup/user_topk", {"entities": [user]}))["answers"]
        blocked_item = answer["items"][0]
        change_blocklist(own_config.store(), block_items=[blocked_item.encode()])

        async def is_in_force() -> bool:
            batch = await running.post("/v1/lookup/user_topk", {"entities": [user]})
            return blocked_item not in batch["answers"][0]["items"]

        assert await eventually(is_in_force)
        held_start.may_end.set()
        await starting

        assert blocked_item not in await items("control")
        assert blocked_item not in await items("b")


async def test_a_service_that_starts_opens_every_arm_once(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_config, arm_config = arms(tmp_path, redis_url)
    experiments.start(own_config, option(own_config.namespace, arm_config.namespace), holdout_share=None)
    opened: list[ServedNamespace] = []
    is_opened_again = asyncio.Event()

    async def load_for_long(arm: ServedNamespace) -> None:
        opened.append(arm)
        if len(opened) > 1:
            is_opened_again.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_opened_again.wait(), LOADS_S)
        await load_at_once(arm)

    monkeypatch.setattr(ServedNamespace, "start", load_for_long)
    async with serving(own_config, blocklist_poll_s=0.05) as running:

        async def is_held() -> bool:
            body = {"entities": [min(histories(own_config))], "arm": "ranker=b"}
            return (await running.http.post("/v1/lookup/user_topk", json=body)).status_code == 200

        assert await eventually(is_held)

    assert len(opened) == 1


async def test_an_experiment_stops_while_the_arm_of_another_loads(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_config, arm_config, third = arms(tmp_path, redis_url, 2)
    user = min(histories(own_config))
    experiments.start(own_config, option(own_config.namespace, arm_config.namespace), holdout_share=None)
    held_start = HeldStart()

    async with serving(own_config) as running:

        async def status() -> int:
            body = {"entities": [user], "arm": "ranker=b"}
            return (await running.http.post("/v1/lookup/user_topk", json=body)).status_code

        async def is_held() -> bool:
            return await status() == 200

        async def is_stopped() -> bool:
            return await status() == 409

        assert await eventually(is_held)
        held_start.put_in_force(monkeypatch)
        named = (ArmOption("control", own_config.namespace, 0.5), ArmOption("b", third.namespace, 0.5))
        second = ExperimentOption(own_config.namespace, "other", named, 0.3)
        starting = asyncio.create_task(asyncio.to_thread(experiments.start, own_config, second, holdout_share=None))
        await asyncio.wait_for(held_start.has_begun.wait(), 30)
        stopping = asyncio.create_task(asyncio.to_thread(experiments.stop, own_config, "ranker"))
        has_stopped = await eventually(is_stopped, timeout_s=10)
        held_start.may_end.set()
        await asyncio.gather(starting, stopping)

    assert has_stopped
