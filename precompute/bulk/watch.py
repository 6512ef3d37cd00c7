"""Watch over the latency of Redis' readers: probes over a connection of its own, heartbeats, and Redis' own figures."""

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache.control.control_keys import Control
from cache.errors import LarderError
from cache.l2.resp import info_number, refusing_unreadable
from cache.l2.sync_clients import (
    BulkConnections,
    clone_client,
    disconnect,
    group_keys_by_server,
    primary_clients,
)

log = logging.getLogger(__name__)

LOOK_S = 0.5
FIRST_LOOK_S = 0.1
PROBE_TIMEOUT_S = 1.0
RETRY_S = 1.0
UNASKED_S = 2.0
"""Seconds without a call after which probes end, because no work needs them."""

ROUND_TRIPS_MAX = 4_096
FOREIGN_READS_S = 20.0
"""Reads per second by other clients that count as readers, even if no replica sends heartbeats."""

PROBED_BYTES = 512
PAGES_TRIED = 32
"""Number of page keys among which one of each node of a cluster is searched."""

_TROUBLE = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException)
REPLY_BYTES = 4096
READS = ("cmdstat_get", "cmdstat_getrange", "cmdstat_mget")
PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


@dataclass(frozen=True, slots=True)
class RedisObservation:
    """State of Redis and its readers at one moment; `foreign_s` is None until two observations can be compared."""

    at: float
    replicas_ms: Mapping[str, float] = field(default_factory=dict)
    replicas: int = 0
    foreign_s: float | None = None
    busy: float = 0.0
    followers: int = 0
    lag_bytes: int = 0


class Watcher:
    """Watch on Redis and its readers, in a thread of its own; no error that it meets reaches the governed work."""

    def __init__(self, control: Control, *, probe_ms: float) -> None:
        self._caller_control = control
        self._own_control: Control | None = None
        self._gap_s = probe_ms / 1000
        self._round_trips_s: deque[float] = deque(maxlen=ROUND_TRIPS_MAX)
        self._observation: RedisObservation | None = None
        self._own_work = self._own_probes = 0  # each written by one thread only
        self._previous_counters: tuple[float, int, dict[str, float]] | None = None
        self._stirring: list[Any] | None = None
        self._is_stirred = True
        self._asked_at = -math.inf
        self._closing = threading.Event()
        self._jitter = random.Random(
            0
        )  # evenly spaced probes could fall between evenly spaced pieces
        self._thread = threading.Thread(target=self._run, name="larder-watch", daemon=True)
        self._thread.start()

    def get_latest_observation(self) -> RedisObservation | None:
        """Return the thread's newest observation, None before Redis' first answer."""
        return self._observation

    def round_trips(self) -> list[float]:
        """Return the seconds of each probe since the last call, inf without a reply; keep the probes running."""
        self._asked_at = time.perf_counter()
        return [self._round_trips_s.popleft() for _ in range(len(self._round_trips_s))]

    def own_reads(self, count: int) -> None:
        """Count reads of our own, which observations do not take for a reader's."""
        self._own_work += count

    def stir(self) -> None:
        """Ping each server over connections of the calling thread's own; after an error never again."""
        if not self._is_stirred or self._own_control is None:
            return
        try:
            if self._stirring is None:
                servers = primary_clients(self._own_control.client).values()
                self._stirring = [server.connection_pool.get_connection() for server in servers]
            for connection in self._stirring:
                connection._sock.sendall(PING)
            for connection in self._stirring:
                self._is_stirred &= bool(connection._sock.recv(len(PONG)))
        except (*_TROUBLE, OSError):
            self._is_stirred = False

    def close(self) -> None:
        """Stop the watching thread and close its connections; safe to repeat."""
        self._is_stirred = False
        self._closing.set()
        self._thread.join(2 * PROBE_TIMEOUT_S)
        if self._own_control is not None:
            disconnect(self._own_control.client)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._watch()
            except (*_TROUBLE, LarderError, OSError, ValueError) as error:
                log.debug("the watch over readers starts again: %s", error)
                self._pause()
            except Exception as error:
                log.warning("the watch over readers starts again, after %r", error)
                self._pause()

    def _pause(self) -> None:
        self._round_trips_s.append(math.inf)
        self._closing.wait(RETRY_S)

    def _watch(self) -> None:
        probes: list[tuple[Any, bytes]] = []
        observation_count = 0
        due = time.perf_counter()
        if self._own_control is None:
            client = clone_client(
                self._caller_control.client,
                socket_timeout=PROBE_TIMEOUT_S,
                socket_connect_timeout=PROBE_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
            )
            self._own_control = Control(client, self._caller_control.keyspace)
        with BulkConnections() as connections:
            while not self._closing.is_set():
                if time.perf_counter() >= due:
                    self._observation = self._observe(self._own_control)
                    observation_count += 1
                    due = time.perf_counter() + (FIRST_LOOK_S if observation_count == 1 else LOOK_S)
                if time.perf_counter() - self._asked_at > UNASKED_S:
                    self._closing.wait(max(0.0, min(0.01, due - time.perf_counter())))
                    continue
                if not probes:
                    probes = list(self._probes(self._own_control, connections))
                self._round_trips_s.append(
                    self._round_trip(*probes[self._own_probes % len(probes)])
                )
                time.sleep(self._gap_s * self._jitter.uniform(0.5, 1.5))

    def _round_trip(self, connection: Any, probe: bytes) -> float:
        """Measure a round trip on the bare socket: other work in a probe would delay readers on this host."""
        wire = connection._sock
        started_at = time.perf_counter()
        wire.sendall(probe)
        reply: bytes = wire.recv(REPLY_BYTES)
        while not is_whole(reply):
            if not (more := wire.recv(REPLY_BYTES)):
                raise ConnectionError("Redis closed the connection")
            reply += more
        spent_s = time.perf_counter() - started_at
        self._own_probes += 1
        return spent_s

    def _probes(
        self, control: Control, connections: BulkConnections
    ) -> Iterator[tuple[Any, bytes]]:
        """Yield, per server, a connection and a probe that reads a live page's record like a reader."""
        keys, pointer = control.keyspace, control.read_pointer()
        self._own_probes += 1
        loaded: Any = control.client.hgetall(keys.loaded(pointer.generation)) if pointer else {}
        tables = sorted({part_name.decode().partition("/")[0] for part_name in loaded})
        names = [keys.live]
        if pointer is not None and tables:
            names = [keys.page(pointer.generation, tables[0], page) for page in range(PAGES_TRIED)]
        for server, positions in group_keys_by_server(control.client, names):
            connection = connections.connection_to(server)
            command = "GETRANGE", names[positions[0]], 0, PROBED_BYTES - 1
            yield connection, b"".join(connection.pack_command(*command))

    def _observe(self, control: Control) -> RedisObservation:
        replicas = control.replicas()
        heard = {
            replica.name: replica.l2_p99_ms
            for replica in replicas
            if isinstance(replica.l2_p99_ms, int | float)
        }
        servers = primary_clients(control.client)
        infos = {name: info_of(server) for name, server in servers.items()}
        now_s, own_read_count = time.perf_counter(), self._own_work + self._own_probes
        reads = -own_read_count
        for info in infos.values():
            reads += reads_of(info)
        cpu = {server: cpu_s(info) for server, info in infos.items()}
        earlier_totals, self._previous_counters = self._previous_counters, (now_s, reads, cpu)
        foreign, busy = None, 0.0
        if earlier_totals is not None and (spent_s := now_s - earlier_totals[0]) > 0:
            foreign = max(0.0, (reads - earlier_totals[1]) / spent_s)
            spent = [used - earlier_totals[2].get(server, used) for server, used in cpu.items()]
            busy = max([0.0, *spent]) / spent_s
        follower_count = sum(info_number(info, "connected_slaves", 0) for info in infos.values())
        behind = max(map(lag_bytes, infos.values()), default=0)
        return RedisObservation(now_s, heard, len(replicas), foreign, busy, follower_count, behind)


def is_whole(reply: bytes) -> bool:
    """True if this is a complete bulk string (RESP); raise ValueError for another reply."""
    head, separator, payload = reply.partition(b"\r\n")
    if reply and not reply.startswith(b"$"):
        raise ValueError(f"a probe was answered by {reply[:80]!r}")
    return bool(separator) and len(payload) == int(head[1:]) + 2


def info_of(server: "redis.Redis") -> dict[str, Any]:
    """Return counts of commands, processor time and replication; empty if the user may not call INFO."""
    try:
        info: Any = server.info("commandstats", "cpu", "replication")
        return dict(info)
    except redis.exceptions.NoPermissionError:
        return {}


def lag_bytes(info: Mapping[str, Any]) -> int:
    """Return the bytes that the slowest replica of a server lags behind it."""
    offset = info_number(info, "master_repl_offset", 0)
    count = info_number(info, "connected_slaves", 0)
    replicas = (info.get(f"slave{number}") for number in range(count))
    return max(
        [0]
        + [
            offset - int(replica["offset"])
            for replica in replicas
            if isinstance(replica, dict) and replica.get("state") == "online"
        ]
    )


def reads_of(info: Mapping[str, Any]) -> int:
    """Return the number of read commands (READS) that a server has answered."""
    with refusing_unreadable("INFO", "statistics of commands"):
        return sum(int(info[name]["calls"]) for name in READS if name in info)


def cpu_s(info: Mapping[str, Any]) -> float:
    """Return the processor time of the thread that answers."""
    used = info.get("used_cpu_user_main_thread", 0), info.get("used_cpu_sys_main_thread", 0)
    with refusing_unreadable("INFO", "processor times"):
        return float(sum(used))
