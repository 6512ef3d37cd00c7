"""Looks at both Redis: that of pages, and that of events."""

import asyncio
from typing import TYPE_CHECKING

from cache.errors import LarderError
from infra.cli.check.found import CheckResult
from infra.cli.check.redis_kind import kind_of
from infra.cli.redis import place_of

if TYPE_CHECKING:
    from cache.config.night import NightConfig
    from serving.events.durability import FoundDurability

REDIS_S = 3.0


def look_at_redis(config: "NightConfig") -> CheckResult:
    """Look at the Redis of pages: what it is, what it lacks, and what it may evict."""
    from redis import RedisError

    from cache.l2.sync_clients import masters, open_client
    from cache.process.redis_server import find_server, running_server

    running_redis = running_server(config.path(config.state))
    url = config.redis_url or (running_redis.url if running_redis else None)
    if url is None:
        return (
            "ok",
            f"none is configured: each command runs {find_server()} for as long as it lasts (`larder redis`)",
        )
    try:
        client = open_client(url, protocol=2, socket_timeout=REDIS_S)
        try:
            servers = masters(client).values()
            policies = {
                str(server.info("memory").get("maxmemory_policy", "")) for server in servers
            }
            kinds = sorted({kind_of(server) for server in servers})
        finally:
            client.close()
    except (RedisError, ValueError, OSError) as error:
        return (
            "to do",
            f"{place_of(url)} cannot be used: {error}; is REDIS_URL right, and does it run?",
        )
    if unfit := sorted(policy for policy in policies if policy.startswith("allkeys")):
        return "to do", f"maxmemory-policy {unfit[0]} may evict published pages: set volatile-lru"
    for kind in kinds:
        if kind.missing:
            return "to do", f"{place_of(url)} is {kind}, which has no {', no '.join(kind.missing)}"
    summary = (
        f"{place_of(url)}{'' if config.redis_url else ', of `larder redis` or another command'}; "
    )
    summary += ", ".join(map(str, kinds))
    without = sorted({lacking_command for kind in kinds for lacking_command in kind.without})
    return "ok", summary + "".join(f"; without {lacking_command}" for lacking_command in without)


def look_at_events(config: "NightConfig") -> CheckResult:
    """Look at the Redis of events: whether it keeps what is demanded."""
    if not config.events.enabled:
        return "not used", "[events] enabled is false: no service takes events in"
    from cache.process.redis_server import running_server

    running_redis = running_server(config.path(config.state))
    url = config.events_redis or (running_redis.url if running_redis else "")
    if not url:
        return "ok", "in the Redis that each command runs for as long as it lasts: gone with it"
    try:
        durability, policy = asyncio.run(_looked_at(url, config))
    except LarderError as error:
        return (
            "to do",
            f"{place_of(url)} cannot be used: {error.message}; is LARDER_EVENTS_URL right, and does it run?",
        )
    if policy.startswith("allkeys"):
        return (
            "to do",
            f"maxmemory-policy {policy} may evict events: set "
            + ("noeviction" if config.events_url else "volatile-lru"),
        )
    may_evict_ids = policy.startswith("volatile")
    if may_evict_ids and config.events_url:
        return (
            "to do",
            f"maxmemory-policy {policy} may evict the ids that make a repetition none: set noeviction",
        )
    demanded = config.events.durability
    if not durability.suffices(demanded):
        summary = f"durability = {demanded!r} is demanded, and {place_of(url)} has {durability.persistence!r}"
        return "to do", f"{summary}: set appendonly yes and appendfsync {demanded} there"
    summary = f"{place_of(url)}; durability {durability.persistence}, maxmemory-policy {policy or 'not told'}"
    return "ok", summary + (
        ", which may evict ids of events: a repetition may count" if may_evict_ids else ""
    )


async def _looked_at(url: str, config: "NightConfig") -> "tuple[FoundDurability, str]":
    from serving.events.connection import EventsRedis

    redis = EventsRedis(url, config.events.durability)
    try:
        durability = await redis.look_at_durability()
        policy = await redis.eviction_policy()
    finally:
        await redis.aclose()
    return durability, policy
