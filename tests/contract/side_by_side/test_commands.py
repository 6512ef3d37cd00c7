"""Commands of `larder` end with the same codes in both, and tell programs under the same names."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.cli.commands import ENTRY_BY_NAME
from tests.contract.side_by_side.commands import Outcome, difference_of_outcomes, outcomes
from tests.contract.side_by_side.stages import await_ready
from tests.contract.side_by_side.twins import Checkouts, twins
from tests.contract.side_by_side.world import ARM_NAMESPACE, CUTS, NAMESPACE, Shop, ShopFacts, running_redis

pytestmark = pytest.mark.storm

NEXT_CUT = "2026-01-30T00:00:00Z"
ENDLESS = {"demo", "redis", "serve"}
"""Commands that go on until they are stopped."""


def commands_of(shop_facts: ShopFacts) -> list[list[str]]:
    """Commands over a shop, in this order: what each leaves is what the next one meets; many are refused."""
    live, previous, tried, _ = shop_facts.generations
    user, item = shop_facts.users[40], shop_facts.items[40]
    reason_options = ["--reason", "a test"]
    arms = ["--arm", f"control={NAMESPACE}:0.5", "--arm", f"b={ARM_NAMESPACE}:0.5"]
    return [
        [], ["--help"], ["--version"], ["nothing"], ["night", "--nothing"], ["night", "--help"],
        ["check", "--json"], ["status", "--json"], ["status"], ["plan", "--json"], ["plan", "--json", "--qps", "100"],
        ["plan", "--json", "--qps", "x"],
        ["audit", "--json"], ["audit", "--json", "--since", "2026-01-01"], ["audit", "--since", "soon"],
        ["worklist", "--json"], ["worklist", "--json", "--limit", "2"],
        ["pin", previous, *reason_options, "--json"], ["pin", "nothing", *reason_options, "--json"], ["pin", previous],
        ["unpin", previous, "--json"], ["unpin", "nothing", "--json"],
        ["block", "--item", item, "--json", *reason_options], ["unblock", "--item", item, "--json"],
        ["block", "--json"],
        ["block", "--entity", user, "--item", item, "--json"], ["unblock", "--entity", user, "--json"],
        ["erase", user, "--json", *reason_options], ["erase", "--list", "--json"],
        ["erase", user, "--status", "--json"],
        ["erase", user, "--forget", "--json", *reason_options], ["erase", "--json"],
        ["erase", "nobody", "--status", "--json"],
        ["experiment", "start", "ranker", "--share", "0.4", *arms, "--json"],
        ["experiment", "start", "other", "--json"],
        ["experiment", "start", "other", "--arm", "control=nothing:1", "--json"],
        ["experiment", "status", "ranker", "--json"], ["experiment", "status", "nothing", "--json"],
        ["experiment", "share", "ranker", "--share", "0.6", "--json"],
        ["experiment", "share", "--holdout", "0.05", "--json"],
        ["experiment", "share", "ranker", "--share", "7", "--json"], ["experiment", "exposures", "--json"],
        ["experiment", "stop", "ranker", *reason_options, "--json"], ["experiment", "retire", "ranker", "--json"],
        ["canary", "status", "--json"], ["canary", "start", "nothing", "--json"],
        ["canary", "start", tried, "--percent", "20", "--json"], ["canary", "status", "--json"],
        ["canary", "abandon", "--json"], ["canary", "abandon", *reason_options, "--json"],
        ["canary", "publish", "--json"],
        ["override", tried, "--rule", "nothing", *reason_options, "--json"], ["override", tried, "--json"],
        ["verify", tried, "--json"], ["publish", tried, "--json"], ["publish", "nothing", "--json"],
        ["roll-back", "--json"], ["roll-back", *reason_options, "--json"],
        ["roll-back", "--to", "nothing", *reason_options, "--json"],
        ["warm", live, "--json"], ["retire", live], ["retire", "--json"],
        ["restore", "--json"], ["restore", "--adopt", "--json"],
        ["take-events", "--json"], ["night", "--data-until", CUTS[0], "--json"],
        ["night", "--data-until", "soon", "--json"], ["night", "--until", "nothing"],
        ["begin", "--data-until", NEXT_CUT, "--json"], ["score", "nothing", "--json"], ["index", "nothing", "--json"],
        ["quantize", "nothing", "--json"], ["load", "nothing", "--json"], ["verify", "nothing", "--json"],
        ["night", "--data-until", NEXT_CUT, "--json"], ["status", "--json"],
        ["freshness", "--json"], ["hand-over", "bundle", "--json"], ["hand-over", "nothing", "--json"],
        ["tokens", "--file", "made.json", "add", "one", "--scope", "read", "--json"],
        ["tokens", "--file", "made.json", "add", "one", "--scope", "read", "--json"],
        ["tokens", "add", "one", "--json"], ["tokens", "--file", "made.json", "list", "--json"],
        ["tokens", "--file", "made.json", "revoke", "one", "--json"],
        ["tokens", "--file", "made.json", "revoke", "one", "--json"], ["tokens", "list", "--json"],
        ["init", ".", "--output", "made.toml", "--json"], ["init", ".", "--output", "made.toml", "--json"],
        ["init", "nothing", "--json"], ["init", "artifacts", "--output", "less.toml", "--json"],
        ["import", "vectors", "--items", "vectors.parquet", "--to", "made", "--json"],
        ["import", "vectors", "--items", "nothing", "--to", "made-2", "--json"], ["import", "nothing"],
        ["dags", "install", "dags-folder", "--json"], ["dags", "install", "dags-folder", "--json"], ["dags"],
        ["train", "--data-until", CUTS[0], "--json"], ["train", "--data-until", "soon", "--json"],
        ["completion", "nothing"], ["completion", "bash"], ["explain"], ["lookup", "user_topk"],
        ["lookup", "user_topk", "a", "--url", "http://127.0.0.1:1", "--json"], ["top", "--once", "--url", "ftp://a"],
        ["top", "--json", "--url", "http://127.0.0.1:1"], ["--config", "nothing.toml", "status"],
    ]  # fmt: skip


def asking(url: str, user_id: str) -> list[list[str]]:
    """Commands that ask a running service."""
    at = ["--url", url, "--json"]
    return [
        ["lookup", "user_topk", user_id, *at], ["lookup", "user_topk", user_id, "--k", "3", *at],
        ["lookup", "user_topk", user_id, "--k", "999", *at], ["lookup", "nothing", user_id, *at],
        ["lookup", "user_topk", "new", "--history", "i-00001,i-00002", "--features", '{"country": 1}', *at],
        ["lookup", "user_topk", user_id, "--filter", "in_stock", "--rerank", "varied", *at],
        ["lookup", "user_topk", user_id, "--filter", "{", *at],
        ["lookup", "user_topk", user_id, "--generation", "x", *at],
        ["explain", "user_topk", user_id, *at], ["explain", "user_vector", "nobody", *at],
        ["explain", "user_topk", "new", "--history", "i-00001", "--features", '{"country": 1}', *at],
        ["explain", "nothing", user_id, *at], ["top", *at],
    ]  # fmt: skip


def test_commands_of_a_shop(checkouts: Checkouts, shop: Shop, tmp_path: Path) -> None:
    shop_facts = shop.facts
    commands = commands_of(shop_facts)
    sides = []
    for side, checkout in zip(("left", "right"), checkouts, strict=True):
        with running_redis(tmp_path / f"redis-{side}") as url:
            shop.redis.restore(url)
            copy = shop.copied_to(tmp_path / side)
            sides.append(outcomes(checkout, copy.folder, copy.environ(url), commands))

    codes: defaultdict[str, set[int]] = defaultdict(set)
    for outcome in sides[0]:
        codes[outcome.arguments[0] if outcome.arguments else ""].add(outcome.code)
    print("\n".join(f"{name}: {', '.join(map(str, sorted(exit_codes)))}" for name, exit_codes in sorted(codes.items())))
    assert_alike(sides)
    assert ENTRY_BY_NAME.keys() - codes.keys() == ENDLESS


def test_commands_that_ask_a_service(checkouts: Checkouts, shop: Shop, tmp_path: Path) -> None:
    with twins(tmp_path, shop, checkouts) as pair:
        await_ready(pair)
        sides = [
            outcomes(checkout, pair.shop.folder, pair.shop.environ(redis_url), asking(url, shop.facts.users[40]))
            for checkout, url, redis_url in zip(checkouts, pair.urls, pair.redis_urls, strict=True)
        ]

    assert_alike(sides)


def assert_alike(sides: Sequence[Sequence[Outcome]]) -> None:
    """Raise AssertionError with the commands that did not end alike."""
    differing = [
        f"larder {' '.join(left_outcome.arguments)}: {change}"
        for left_outcome, right in zip(*sides, strict=True)
        if (change := difference_of_outcomes(left_outcome, right)) is not None
    ]
    assert not differing, "\n".join(differing)
