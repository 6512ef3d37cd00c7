"""Replicated Redis: its nodes, whether they changed since verification, and whether all of them have every page."""

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

WAIT_S_MAX = 0.5
"""Most seconds that one `WAIT` blocks its connection, so that no socket times out."""

CONNECT_TIMEOUT_S = 1.0
UNREACHABLE = "unreachable"

RunIds = dict[str, str]
"""Node -> its run id, which changes at every start: "primary" (several in a cluster), replicas by address."""


class VerifyReport(TypedDict, total=False):
    """Report of `verify`: run ids of Redis' nodes, and the live generation that gates compared with, if any."""

    run_ids: RunIds
    baseline: str | None


def run_ids(client: "redis.Redis") -> RunIds:
    """Return the run ids of the primaries and their replicas; `UNREACHABLE` for a replica that does not answer.

    `verify` takes them before it reads pages back, and keeps them in its report.
    """
    run_id_by_node = {}
    for primary_name, primary_client in primary_clients(client).items():
        info: Any = primary_client.info("server")
        run_id_by_node[primary_name] = str(info.get("run_id", ""))
        for replica_address, replica in _replica_info_by_address(primary_client).items():
            run_id_by_node[replica_address] = _fetch_run_id(primary_client, str(replica["ip"]), int(replica["port"]))
    return run_id_by_node


def confirm_pages(
    releases: Releases,
    generation: str,
    verified: VerifyReport | None,
    *,
    timeout_s: float,
    governor: Governor | None = None,
) -> list[str]:
    """Make sure that every node has the verified pages; return the nodes that were restarted since verification.

    Call it right before a publish moves the pointer, with verify's report (work/verified.json, None if there is none).
    If a node was restarted since, or that is unknown, all pages are read back and repaired. Then all replicas must
    catch up within `timeout_s`, else it raises Conflict. Without replicas, and with the same primary, it costs two
    commands.
    """
    if not GENERATION_PATTERN.fullmatch(generation):
        raise Conflict(f"{generation!r} is not a generation id", generation=generation)
    control = releases.control
    current_run_ids = run_ids(control.client)
    verified_run_ids = {} if verified is None else verified.get("run_ids") or {}
    changed_nodes = [
        node_name for node_name, run_id in current_run_ids.items() if verified_run_ids.get(node_name) != run_id
    ]
    if changed_nodes:
        reload(control, releases.store, generation, governor=governor)
    deadline = time.monotonic() + timeout_s
    for primary_client in primary_clients(control.client).values():
        wait_for_replicas(primary_client, timeout_s=max(0.0, deadline - time.monotonic()))
    if _primary_run_ids(run_ids(control.client)) != _primary_run_ids(current_run_ids):
        raise Conflict(
            f"Redis was restarted while {generation} was being checked, nothing was published; publish again",
            generation=generation,
        )
    return changed_nodes


def _primary_run_ids(run_id_by_node: RunIds) -> RunIds:
    return {node_name: run_id for node_name, run_id in run_id_by_node.items() if node_name.startswith("primary")}


def wait_for_replicas(
    client: "redis.Redis", *, timeout_s: float, monotonic_clock: Callable[[], float] = time.monotonic
) -> int:
    """Return the number of replicas once each of them has all writes; raise Conflict after `timeout_s`."""
    deadline, caught_up_count = monotonic_clock() + timeout_s, 0
    while True:
        replica_info_by_address = _replica_info_by_address(client)
        if not replica_info_by_address:
            return 0
        late_replicas = sorted(
            replica_address
            for replica_address, replica_info in replica_info_by_address.items()
            if replica_info.get("state") != "online"
        )
        left_s = deadline - monotonic_clock()
        if not late_replicas:
            wait_ms = max(1, math.ceil(1000 * min(WAIT_S_MAX, max(left_s, 0.0))))
            # PING and WAIT share a connection: WAIT covers only writes of its own connection.
            with client.pipeline(transaction=False) as pipeline:
                pipeline.ping()
                pipeline.wait(len(replica_info_by_address), wait_ms)
                caught_up_count = int(pipeline.execute()[1])
            if caught_up_count >= len(replica_info_by_address):
                return len(replica_info_by_address)
        elif left_s > 0:
            time.sleep(min(0.05, left_s))
        if left_s <= 0:
            reason = f"{', '.join(late_replicas)} not online" if late_replicas else "others lag or do not answer"
            raise Conflict(
                (
                    f"{caught_up_count} of {len(replica_info_by_address)} Redis replicas have every page after "
                    f"{timeout_s:g} s ({reason}), "
                    "so nothing was published; repair the replication or remove those replicas, then publish again"
                ),
                replicas=len(replica_info_by_address),
                caught_up=caught_up_count,
            )


def _replica_info_by_address(client: "redis.Redis") -> dict[str, dict[str, Any]]:
    """Return "host:port" -> the primary's fields on that replica."""
    info: Any = client.info("replication")
    replica_count = info_number(info, "connected_slaves", 0)
    replica_infos = (info.get(f"slave{replica_number}") for replica_number in range(replica_count))
    with refusing_unreadable("INFO", "replicas with their ip and port"):
        return {
            f"{replica_info['ip']}:{replica_info['port']}": replica_info
            for replica_info in replica_infos
            if isinstance(replica_info, dict)
        }


def _fetch_run_id(client: "redis.Redis", host: str, port: int) -> str:
    """Return a replica's run id, read with the credentials of the primary's client; UNREACHABLE on an error."""
    option_names = ("username", "password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "protocol")
    pool = client.connection_pool
    options = {
        option_name: pool.connection_kwargs[option_name]
        for option_name in option_names
        if option_name in pool.connection_kwargs
    }
    is_ssl = issubclass(pool.connection_class, redis.SSLConnection)
    try:
        client = redis.Redis(
            host=host, port=port, ssl=is_ssl, socket_timeout=CONNECT_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S, retry=Retry(NoBackoff(), 0), **options,
        )  # fmt: skip
        with check_replies(bound_replies(client)) as replica:
            info: Any = replica.info("server")
            return str(info.get("run_id", ""))
    except (redis.exceptions.RedisError, OSError):
        return UNREACHABLE
