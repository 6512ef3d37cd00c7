"""A replicated Redis: which nodes there are, whether they are those that were verified, whether all have every page."""

import math
import time
from collections.abc import Callable
from typing import Any, TypedDict

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache.errors import Conflict
from cache.format.manifest import GENERATION_PATTERN
from cache.l2.resp import bound_replies, check_replies, info_number, refusing_unreadable
from cache.l2.sync_clients import primary_clients
from precompute.bulk.governor import Governor
from precompute.bulk.reload import reload
from precompute.releases.release_log import Releases

WAIT_S = 0.5
"""Seconds that one `WAIT` blocks its connection at most, so that no socket times out meanwhile."""

CONNECT_S = 1.0
UNREACHABLE = "unreachable"

RunIds = dict[str, str]
"""Node -> its run id, which changes whenever it starts: "primary" (a cluster has several), replicas by address."""


class VerifyReport(TypedDict, total=False):
    """Report of `verify`: run ids of Redis' nodes, and the live generation that gates compared with; empty without."""

    run_ids: RunIds
    baseline: str | None


def run_ids(client: "redis.Redis") -> RunIds:
    """Run ids of the primary and each of its replicas; a replica that cannot be asked is `UNREACHABLE`.

    Verifying takes them before it reads pages back, and keeps them in its report.
    """
    run_id_by_node = {}
    for primary, server in primary_clients(client).items():
        info: Any = server.info("server")
        run_id_by_node[primary] = str(info.get("run_id", ""))
        for name, replica in _replicas(server).items():
            run_id_by_node[name] = _fetch_run_id(server, str(replica["ip"]), int(replica["port"]))
    return run_id_by_node


def confirm(
    releases: Releases,
    generation: str,
    verified: VerifyReport | None,
    *,
    timeout_s: float,
    governor: Governor | None = None,
) -> list[str]:
    """Make sure that every node has the verified pages; return the nodes that had changed. Raise Conflict otherwise.

    To be called right before a publish moves the pointer, with verify's report (work/verified.json, None when there
    is none). If a node started since, or that is unknown, all pages are read back and repaired; then all replicas
    must have caught up within `timeout_s`. Without replicas, and with the same primary, it costs two commands.
    """
    if not GENERATION_PATTERN.fullmatch(generation):
        raise Conflict(f"{generation!r} is not a generation id", generation=generation)
    control = releases.control
    current_run_ids = run_ids(control.client)
    verified_run_ids = {} if verified is None else verified.get("run_ids") or {}
    changed_nodes = [
        name for name, run_id in current_run_ids.items() if verified_run_ids.get(name) != run_id
    ]
    if changed_nodes:
        reload(control, releases.store, generation, governor=governor)
    ends_at = time.monotonic() + timeout_s
    for server in primary_clients(control.client).values():
        wait_for_replicas(server, timeout_s=max(0.0, ends_at - time.monotonic()))
    if _primaries(run_ids(control.client)) != _primaries(current_run_ids):
        raise Conflict(
            f"Redis was restarted while {generation} was being confirmed, nothing was published; publish again",
            generation=generation,
        )
    return changed_nodes


def _primaries(ids: RunIds) -> RunIds:
    return {name: run_id for name, run_id in ids.items() if name.startswith("primary")}


def wait_for_replicas(
    client: "redis.Redis", *, timeout_s: float, timer: Callable[[], float] = time.monotonic
) -> int:
    """Return once every replica has all that was written; how many there are. Raises Conflict after `timeout_s`."""
    ends_at, caught_up = timer() + timeout_s, 0
    while True:
        replicas = _replicas(client)
        if not replicas:
            return 0
        late = sorted(
            name for name, replica in replicas.items() if replica.get("state") != "online"
        )
        left_s = ends_at - timer()
        if not late:
            wait_ms = max(1, math.ceil(1000 * min(WAIT_S, max(left_s, 0.0))))
            # On one connection: WAIT is about what that connection has seen written.
            with client.pipeline(transaction=False) as pipeline:
                pipeline.ping()
                pipeline.wait(len(replicas), wait_ms)
                caught_up = int(pipeline.execute()[1])
            if caught_up >= len(replicas):
                return len(replicas)
        elif left_s > 0:
            time.sleep(min(0.05, left_s))
        if left_s <= 0:
            reason = f"{', '.join(late)} not online" if late else "the others lag or do not answer"
            raise Conflict(
                f"{caught_up} of {len(replicas)} Redis replicas have every page after {timeout_s:g} s ({reason}), "
                "nothing "
                "was published; mend the replication or take those replicas away, then publish again",
                replicas=len(replicas),
                caught_up=caught_up,
            )


def _replicas(client: "redis.Redis") -> dict[str, dict[str, Any]]:
    """Return host and port -> the primary's fields on the replica."""
    info: Any = client.info("replication")
    count = info_number(info, "connected_slaves", 0)
    replica_infos = (info.get(f"slave{number}") for number in range(count))
    with refusing_unreadable("INFO", "replicas with their ip and port"):
        return {
            f"{replica_info['ip']}:{replica_info['port']}": replica_info
            for replica_info in replica_infos
            if isinstance(replica_info, dict)
        }


def _fetch_run_id(client: "redis.Redis", host: str, port: int) -> str:
    """A replica's run id, asked with the credentials of the primary's client."""
    option_names = (
        "username",
        "password",
        "ssl_ca_certs",
        "ssl_certfile",
        "ssl_keyfile",
        "protocol",
    )
    pool = client.connection_pool
    options = {
        name: pool.connection_kwargs[name]
        for name in option_names
        if name in pool.connection_kwargs
    }
    is_ssl = issubclass(pool.connection_class, redis.SSLConnection)
    try:
        client = redis.Redis(
            host=host, port=port, ssl=is_ssl, socket_timeout=CONNECT_S,
            socket_connect_timeout=CONNECT_S, retry=Retry(NoBackoff(), 0), **options,
        )  # fmt: skip
        with check_replies(bound_replies(client)) as replica:
            info: Any = replica.info("server")
            return str(info.get("run_id", ""))
    except (redis.exceptions.RedisError, OSError):
        return UNREACHABLE
