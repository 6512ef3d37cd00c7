"""Stages of a run: what is moved between them, in both services alike."""

from collections.abc import Callable
from typing import Any, Final

from cache.store.blocklist import change_blocklist
from precompute.canary import trial
from precompute.config.settings import NightConfig
from precompute.experiments import changes
from tests.contract.side_by_side.twins import SETTLE_S, Twins
from tests.contract.side_by_side.world import start_canary, start_experiment
from tests.integration.nights import roll_back
from tests.polling import until

ARM_TARGET: Final = "/v1/lookup/user_topk/nobody?arm=ranker%3Db"


def await_ready(twins: Twins) -> None:
    """Return once both services hold the live generation and the previous one."""
    _await(
        twins,
        lambda told: bool(told.get("ready") and told.get("previous") and not told.get("stale")),
    )


def begin_trials(twins: Twins) -> None:
    """Start the experiment and the canary, and block two more items; return once both services know of it."""
    twins.move(start_experiment)
    twins.move(start_canary)
    items = [item.encode() for item in twins.shop.known.items[20:22]]
    version = change_blocklist(
        twins.shop.config(twins.redis_urls[0]).store(), block_items=items
    ).version
    _await(
        twins,
        lambda told: bool(
            told["canary"] and told["next"] and told["blocklist"]["version"] == version
        ),
    )
    arm = twins.request("GET", ARM_TARGET)
    assert until(lambda: {answer.status for answer in twins.ask(arm)} == {200}, SETTLE_S), (
        twins.ask(arm)
    )


def end_trials(twins: Twins) -> None:
    """Stop the experiment, abandon the canary and roll back; return once both services answer so."""
    twins.move(lambda config: changes.stop(config, "ranker", reason="a test"))
    twins.move(_abandon)
    twins.move(roll_back)
    previous = twins.shop.known.generations[1]
    _await(
        twins, lambda told: bool(told["canary"] is None and told["live"]["generation"] == previous)
    )
    arm = twins.request("GET", ARM_TARGET)
    assert until(lambda: {answer.status for answer in twins.ask(arm)} == {409}, SETTLE_S), (
        twins.ask(arm)
    )


def _abandon(config: NightConfig) -> None:
    trial.abandon(config, None, reason="a test", attempt="abandoned")


def _await(twins: Twins, holds: Callable[[dict[str, Any]], bool]) -> None:
    assert until(
        lambda: all(holds(told) for told in twins.both("/v1/generations")), SETTLE_S, every_s=0.05
    ), twins.both("/v1/generations")
