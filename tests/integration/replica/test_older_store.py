"""An artefact store that was put back from a copy older than what replicas have in force."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from cache.process.redis_server import RedisServer
from cache.store.blocklist import change_blocklist
from infra.cli.check import check_store
from precompute.cli.status import read_state, report_status
from precompute.config.settings import NightConfig
from precompute.erasure.erasing import begin_erasing
from precompute.releases.recovery import restore
from tests.integration.nights import build_night, histories
from tests.integration.serving_app import eventually, serving


@pytest.fixture
def night(tmp_path: Path, own_redis: RedisServer) -> NightConfig:
    return build_night(tmp_path / "night", own_redis.url)


def status_of(night: NightConfig) -> dict[str, Any]:
    return report_status(night, read_state(night))


async def test_blocks_and_erasures_that_a_copy_lacks_are_told_by_status_restore_check_and_the_dashboard(
    night: NightConfig, tmp_path: Path
) -> None:
    # given a copy of the store, and a block and an erasure made after it
    store_folder = Path(night.path(night.artifacts))
    shutil.copytree(store_folder, tmp_path / "copy")
    async with serving(night, dashboard_s=0.2) as app:
        change_blocklist(night.store(), block_items=[b"i1"])
        begin_erasing(night.store(), min(histories(night)).encode(), "user", requested_at=1.0)

        async def is_in_force() -> bool:
            status = await asyncio.to_thread(status_of, night)
            return [replica.get("blocklist_version") for replica in status["replicas"]] == [2]

        assert await eventually(is_in_force)
        status_before = await asyncio.to_thread(status_of, night)
        assert not [problem for problem in status_before["problems"] if "blocklist" in problem]

        # when the store is put back from the copy
        shutil.rmtree(store_folder)
        shutil.copytree(tmp_path / "copy", store_folder)

        async def is_noticed() -> bool:
            status = await asyncio.to_thread(status_of, night)
            return [replica["stale"] for replica in status["replicas"]] == ["blocklist_unreadable"]

        assert await eventually(is_noticed)

        # then status, restore, check and dashboard say so in one line, with the remedy
        status = await asyncio.to_thread(status_of, night)
        (problem,) = [problem for problem in status["problems"] if "blocklist" in problem]
        assert "has version 2 of the blocklist in force, the newest in" in problem
        assert "repeat the blocks and erasures since the copy" in problem and not status["well"]
        restored = await asyncio.to_thread(restore, night, attempt="restore")
        assert restored["notes"] == [problem]
        assert await asyncio.to_thread(check_store, night) == ("to do", problem)
        verdict = (await app.get("/dashboard/data"))["verdict"]
        assert "blocklist_unreadable" in verdict["sentence"] + "".join(verdict["also"])

        # and other blocks, which raise the version in the store to that in force, end it for none of them
        for item_id in (b"i2", b"i3"):
            change_blocklist(night.store(), block_items=[item_id])
        assert await asyncio.to_thread(check_store, night) != ("to do", problem)
        state, told = await asyncio.to_thread(check_store, night)
        assert state == "to do" and "cannot read the newest blocklist" in told

        # and once the block and the erasure were repeated, all is well again
        change_blocklist(night.store(), block_items=[b"i1"])
        begin_erasing(night.store(), min(histories(night)).encode(), "user", requested_at=1.0)

        async def is_over() -> bool:
            status = await asyncio.to_thread(status_of, night)
            return not [problem for problem in status["problems"] if "blocklist" in problem]

        assert await eventually(is_over)
        assert "notes" not in await asyncio.to_thread(restore, night, attempt="restore-2")
