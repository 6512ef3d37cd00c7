"""Stages of a run: the changes made between them, in both services alike."""

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import change_blocklist
from cache.traffic.experiments import latest_experiments
from precompute.config.settings import NightConfig
from precompute.traffic import experiments
from precompute.traffic.canary import trial
from tests.contract.side_by_side.draws import OF_ITEMS, TABLES
from tests.contract.side_by_side.twins import SETTLE_S, Twins
from tests.contract.side_by_side.world import BRANDS, start_canary, start_experiment
from tests.integration.nights import roll_back
from tests.polling import poll_until

ARM: Final = "ranker=b"
ARM_TARGET: Final = f"/v1/lookup/user_topk/nobody?arm={quote(ARM)}"


def await_ready(twins: Twins) -> None:
    """Return once both services hold the live generation and the previous one."""
    _await(twins, lambda view: bool(view.get("ready") and view.get("previous") and not view.get("stale")))


def begin_trials(twins: Twins) -> None:
    """Start the experiment and the canary, block two more items, and wait until both services know."""
    twins.move(start_experiment)
    twins.move(start_canary)
    items = [item.encode() for item in twins.shop.facts.items[20:22]]
    blocklist = change_blocklist(_store(twins), block_items=items)

    def is_there(view: dict[str, Any]) -> bool:
        return bool(view["canary"] and view["next"] and view["blocklist"]["version"] == blocklist.version)

    _await(twins, is_there)
    _await_experiments(twins, status=200)
    twins.arms = (ARM,)
    twins.await_events(has_values=True)
    _level(twins)


def end_trials(twins: Twins) -> None:
    """Stop the experiment, abandon the canary, roll back, and wait until both services answer accordingly."""
    twins.arms = ()
    twins.move(lambda config: experiments.stop(config, "ranker", reason="a test"))
    twins.move(_abandon)
    twins.move(roll_back)
    previous = twins.shop.facts.generations[1]

    def is_back(view: dict[str, Any]) -> bool:
        return bool(view["canary"] is None and view["live"]["generation"] == previous)

    _await(twins, is_back)
    _await_experiments(twins, status=409)
    _level(twins)


def _abandon(config: NightConfig) -> None:
    trial.abandon(config, None, reason="a test", attempt="abandoned")


def _await(twins: Twins, is_reached: Callable[[dict[str, Any]], bool]) -> None:
    assert poll_until(
        lambda: all(is_reached(view) for view in twins.fetch_from_both("/v1/generations")), SETTLE_S, every_s=0.05
    ), twins.fetch_from_both("/v1/generations")


def _await_experiments(twins: Twins, *, status: int) -> None:
    """Wait until both follow the newest experiments and answer a forced arm with this status."""
    arm, metrics = twins.request("GET", ARM_TARGET), twins.request("GET", "/metrics")
    version = latest_experiments(_store(twins)).version
    line = f"larder_experiments_version {float(version)}\n".encode()

    def do_follow() -> bool:
        return all(line in answer.body for answer in twins.send(metrics)) and all(
            answer.status == status for answer in twins.send(arm)
        )

    assert poll_until(do_follow, SETTLE_S, every_s=0.05), (version, twins.send(arm))


def _level(twins: Twins) -> None:
    """Make both read all records of all generations into L1: how many a flip preloads depends on time."""
    shop_facts = twins.shop.facts
    of_items = dict.fromkeys(OF_ITEMS, shop_facts.items)
    for generation in shop_facts.generations:
        for table in TABLES:
            ids = BRANDS if table == "brands" else of_items.get(table, (*shop_facts.users, *shop_facts.removed_users))
            for options in ({}, {"filter": "in_stock"}) if table == "user_topk" else ({},):
                body = {"entities": ids, "generation": generation, **options}
                twins.send(twins.request("POST", f"/v1/lookup/{table}", body))


def _store(twins: Twins) -> ArtefactStore:
    return twins.shop.config(twins.redis_urls[0]).store()
