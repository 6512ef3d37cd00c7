"""Watch over the latency of Redis' readers: by probes over a separate connection, heartbeats, and Redis' figures."""

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
from cache.l2.sync_clients import BulkConnections, clone_client, disconnect, group_keys_by_server, primary_clients

log = logging.getLogger(__name__)

OBSERVE_INTERVAL_S = 0.5
FIRST_OBSERVE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 1.0
RETRY_INTERVAL_S = 1.0
UNASKED_S_MAX = 2.0
"""Seconds without a call of `take_round_trips_s` after which probes stop, because no work needs them."""

ROUND_TRIPS_MAX = 4_096
FOREIGN_READS_PER_S_MIN = 20.0
"""Reads per second by other clients that count as readers, even if no replica sends heartbeats."""

PROBE_BYTES = 512
PROBE_PAGES_TRIED = 32
"""Number of page keys among which one is searched for each node of a cluster."""

_REDIS_ERRORS = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException)
REPLY_BYTES = 4096
READ_COMMAND_STATS = ("cmdstat_get", "cmdstat_getrange", "cmdstat_mget")
PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


@dataclass(frozen=True, slots=True)
class RedisObservation:
    """State of Redis and its readers; `foreign_reads_per_s` is None until two observations can be compared."""

    observed_at: float
    p99_ms_by_replica: Mapping[str, float] = field(default_factory=dict)
    replica_count: int = 0
    foreign_reads_per_s: float | None = None
    redis_busy_share: float = 0.0
    redis_replica_count: int = 0
    redis_lag_bytes: int = 0


class Watcher:
    """Watch on Redis and its readers, in its own thread; its errors do not reach the governed work."""

    def __init__(self, control: Control, *, probe_interval_ms: float) -> None:
        self._caller_control = control
        self._watch_control: Control | None = None
        self._probe_interval_s = probe_interval_ms / 1000
        self._round_trips_s: deque[float] = deque(maxlen=ROUND_TRIPS_MAX)
        self._observation: RedisObservation | None = None
        self._work_read_count = self._probe_count = 0  # each is written by one thread only
        self._previous_counters: tuple[float, int, dict[str, float]] | None = None
        self._stir_connections: list[Any] | None = None
        self._can_stir = True
        self._asked_at = -math.inf
        self._closing_event = threading.Event()
        self._jitter_random = random.Random(0)  # evenly spaced probes could fall between evenly spaced pieces
        self._thread = threading.Thread(target=self._run, name="larder-watch", daemon=True)
        self._thread.start()

    def get_latest_observation(self) -> RedisObservation | None:
        """Return the thread's newest observation, None before Redis' first answer."""
        return self._observation

    def take_round_trips_s(self) -> list[float]:
        """Return the seconds of each probe since the last call, inf without a reply; keep the probes running."""
        self._asked_at = time.perf_counter()
        return [self._round_trips_s.popleft() for _ in range(len(self._round_trips_s))]

    def own_reads(self, own_read_count: int) -> None:
        """Count reads of the work itself, which observations then do not take for a reader's."""
        self._work_read_count += own_read_count

    def stir(self) -> None:
        """Ping each server over separate connections of the calling thread; stop doing so after an error."""
        if not self._can_stir or self._watch_control is None:
            return
        try:
            if self._stir_connections is None:
                servers = primary_clients(self._watch_control.client).values()
                self._stir_connections = [server.connection_pool.get_connection() for server in servers]
            for connection in self._stir_connections:
                connection._sock.sendall(PING)
            for connection in self._stir_connections:
                self._can_stir &= bool(connection._sock.recv(len(PONG)))
        except (*_REDIS_ERRORS, OSError):
            self._can_stir = False

    def close(self) -> None:
        """Stop the watching thread and close its connections; safe to repeat."""
        self._can_stir = False
        self._closing_event.set()
        self._thread.join(2 * PROBE_TIMEOUT_S)
        if self._watch_control is not None:
            disconnect(self._watch_control.client)

    def _run(self) -> None:
        while not self._closing_event.is_set():
            try:
                self._watch()
            except (*_REDIS_ERRORS, LarderError, OSError, ValueError) as error:
                log.debug("the watch over readers starts again: %s", error)
                self._pause()
            except Exception as error:
                log.warning("the watch over readers starts again, after %r", error)
                self._pause()

    def _pause(self) -> None:
        self._round_trips_s.append(math.inf)
        self._closing_event.wait(RETRY_INTERVAL_S)

    def _watch(self) -> None:
        connections_and_probes: list[tuple[Any, bytes]] = []
        observation_count = 0
        observe_at = time.perf_counter()
        if self._watch_control is None:
            client = clone_client(
                self._caller_control.client,
                socket_timeout=PROBE_TIMEOUT_S,
                socket_connect_timeout=PROBE_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
            )
            self._watch_control = Control(client, self._caller_control.keyspace)
        with BulkConnections() as connections:
            while not self._closing_event.is_set():
                if time.perf_counter() >= observe_at:
                    self._observation = self._observe(self._watch_control)
                    observation_count += 1
                    observe_at = time.perf_counter() + (
                        FIRST_OBSERVE_INTERVAL_S if observation_count == 1 else OBSERVE_INTERVAL_S
                    )
                if time.perf_counter() - self._asked_at > UNASKED_S_MAX:
                    self._closing_event.wait(max(0.0, min(0.01, observe_at - time.perf_counter())))
                    continue
                if not connections_and_probes:
                    connections_and_probes = list(self._open_probes(self._watch_control, connections))
                self._round_trips_s.append(
                    self._round_trip(*connections_and_probes[self._probe_count % len(connections_and_probes)])
                )
                time.sleep(self._probe_interval_s * self._jitter_random.uniform(0.5, 1.5))

    def _round_trip(self, connection: Any, probe_command: bytes) -> float:
        """Measure a round trip on the bare socket: further work in a probe would delay readers on this host."""
        socket = connection._sock
        started_at = time.perf_counter()
        socket.sendall(probe_command)
        probe_reply: bytes = socket.recv(REPLY_BYTES)
        while not is_complete_reply(probe_reply):
            if not (further_bytes := socket.recv(REPLY_BYTES)):
                raise ConnectionError("Redis closed the connection")
            probe_reply += further_bytes
        spent_s = time.perf_counter() - started_at
        self._probe_count += 1
        return spent_s

    def _open_probes(self, control: Control, connections: BulkConnections) -> Iterator[tuple[Any, bytes]]:
        """Yield, for each server, a connection and a probe that reads a record of a live page as a reader does."""
        keys, pointer = control.keyspace, control.read_pointer()
        self._probe_count += 1
        part_marks: Any = control.client.hgetall(keys.loaded_parts(pointer.generation)) if pointer else {}
        table_names = sorted({part_name.decode().partition("/")[0] for part_name in part_marks})
        page_keys = [keys.live]
        if pointer is not None and table_names:
            page_keys = [keys.page(pointer.generation, table_names[0], page) for page in range(PROBE_PAGES_TRIED)]
        for server, positions in group_keys_by_server(control.client, page_keys):
            connection = connections.connection_to(server)
            command = "GETRANGE", page_keys[positions[0]], 0, PROBE_BYTES - 1
            yield connection, b"".join(connection.pack_command(*command))

    def _observe(self, control: Control) -> RedisObservation:
        replicas = control.replicas()
        p99_ms_by_replica = {
            replica.name: replica.l2_p99_ms for replica in replicas if isinstance(replica.l2_p99_ms, int | float)
        }
        servers = primary_clients(control.client)
        info_by_server = {server_name: fetch_info(server) for server_name, server in servers.items()}
        now_s, own_read_count = time.perf_counter(), self._work_read_count + self._probe_count
        read_count = -own_read_count
        for info in info_by_server.values():
            read_count += count_reads(info)
        cpu_s_by_server = {server: main_thread_cpu_s(info) for server, info in info_by_server.items()}
        previous_counters, self._previous_counters = (self._previous_counters, (now_s, read_count, cpu_s_by_server))
        foreign_reads_s, busy_share = None, 0.0
        if previous_counters is not None and (spent_s := now_s - previous_counters[0]) > 0:
            foreign_reads_s = max(0.0, (read_count - previous_counters[1]) / spent_s)
            spent_cpu_s = [
                used_cpu_s - previous_counters[2].get(server, used_cpu_s)
                for server, used_cpu_s in cpu_s_by_server.items()
            ]
            busy_share = max([0.0, *spent_cpu_s]) / spent_s
        follower_count = sum(info_number(info, "connected_slaves", 0) for info in info_by_server.values())
        lag_bytes_max = max(map(redis_lag_bytes, info_by_server.values()), default=0)
        return RedisObservation(
            now_s, p99_ms_by_replica, len(replicas), foreign_reads_s, busy_share, follower_count, lag_bytes_max
        )


def is_complete_reply(probe_reply: bytes) -> bool:
    """True if this is a complete bulk string (RESP); raise ValueError for another reply."""
    length_line, separator, payload = probe_reply.partition(b"\r\n")
    if probe_reply and not probe_reply.startswith(b"$"):
        raise ValueError(f"a probe was answered by {probe_reply[:80]!r}")
    return bool(separator) and len(payload) == int(length_line[1:]) + 2


def fetch_info(server_client: "redis.Redis") -> dict[str, Any]:
    """Return counts of commands, processor time and replication; empty if the user may not call INFO."""
    try:
        redis_info: Any = server_client.info("commandstats", "cpu", "replication")
        return dict(redis_info)
    except redis.exceptions.NoPermissionError:
        return {}


def redis_lag_bytes(redis_info: Mapping[str, Any]) -> int:
    """Return the bytes that the slowest replica of a server lags behind it."""
    offset = info_number(redis_info, "master_repl_offset", 0)
    replica_count = info_number(redis_info, "connected_slaves", 0)
    replicas = (redis_info.get(f"slave{replica_number}") for replica_number in range(replica_count))
    return max(
        [0]
        + [
            offset - int(replica["offset"])
            for replica in replicas
            if isinstance(replica, dict) and replica.get("state") == "online"
        ]
    )


def count_reads(redis_info: Mapping[str, Any]) -> int:
    """Return the number of read commands (READ_COMMAND_STATS) that a server has answered."""
    with refusing_unreadable("INFO", "statistics of commands"):
        return sum(
            int(redis_info[command_name]["calls"]) for command_name in READ_COMMAND_STATS if command_name in redis_info
        )


def main_thread_cpu_s(redis_info: Mapping[str, Any]) -> float:
    """Return the processor time of the thread that answers clients."""
    used_s = redis_info.get("used_cpu_user_main_thread", 0), redis_info.get("used_cpu_sys_main_thread", 0)
    with refusing_unreadable("INFO", "processor times"):
        return float(sum(used_s))
