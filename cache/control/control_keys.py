"""Values of the control keys in Redis (pointer, registry, heartbeats, staging note), and the only pointer writer."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import orjson
import redis

from cache.control.states import State
from cache.errors import Conflict, CorruptArtefact, Refused, UnknownFormat
from cache.format.redis_keys import Keyspace
from cache.formats import (
    FIELD,
    FIRST_RELEASE,
    FORMATS,
    HEARTBEAT,
    KEYS,
    POINTER,
    REGISTRY_ROW,
    RELEASE,
    RELEASE_RECORD,
    STAGING_NOTE,
    demand,
    stamp,
    version_of,
)
from cache.l2.resp import COUNT_SHAPE, POINTER_MOVE_SHAPE, checked_reply
from cache.l2.sync_clients import client_for_key, primary_clients
from cache.store.releases import Pointer

REPLICA_DEAD_S = 3.0
"""Seconds without a heartbeat (three missed beats) after which a replica is gone; a beat so far ahead counts alike."""

REPLICA_FORGOTTEN_S = 86_400.0
"""Seconds of silence after which a heartbeat is dropped."""

FIRST_VERSIONS = (1, 1)
"""Oldest and newest version that a replica reads of a format if its heartbeat does not list the format."""

MOVE_FORMATS = (POINTER, RELEASE_RECORD, STAGING_NOTE)
"""Formats that every move of the pointer writes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staging:
    """Staging note, the value of the key `next`; it expires at `until` (Redis' time, Unix seconds)."""

    generation: str
    attempt: str
    until: float

    def to_bytes(self) -> bytes:
        """JSON as stored in Redis."""
        return orjson.dumps({**asdict(self), **stamp(STAGING_NOTE)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Reads `to_bytes`; raises CorruptArtefact for anything else."""
        try:
            data = orjson.loads(raw)
            demand(STAGING_NOTE, version_of(data))
            data.pop(FIELD, None)
            note = cls(**data)
            if not (isinstance(note.generation, str) and isinstance(note.until, int | float)):
                raise TypeError("generation is a string, until a number")
        except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
            raise CorruptArtefact(f"not a staging note: {error}") from error
        return note


@dataclass(frozen=True, slots=True)
class RegistryRow:
    """A generation's row in the registry; `at` is Unix seconds."""

    state: State
    at: float
    reason: str = ""

    def to_bytes(self) -> bytes:
        """JSON as stored."""
        fields = {"state": self.state, "at": self.at, "reason": self.reason}
        return orjson.dumps(fields | stamp(REGISTRY_ROW))

    @classmethod
    def from_bytes(cls, raw: bytes) -> "RegistryRow":
        """Reads `to_bytes`; raises ValueError, TypeError, KeyError or AttributeError for anything else.

        UnknownFormat for one of another release.
        """
        data = orjson.loads(raw)
        demand(REGISTRY_ROW, version_of(data))
        return cls(State(data["state"]), float(data["at"]), str(data.get("reason", "")))


@dataclass(frozen=True, slots=True)
class Replica:
    """A serving replica's last heartbeat; times are Redis' own, Unix seconds.

    `ready`: loaded and warmed, `failed`: generation -> why it cannot be loaded there, `l2_p99_ms`: over the last
    few seconds, `canary`: what it counted while one runs, `overlay_ttl_s`: how long its overlays live at most,
    `memory_available_bytes` and `disk_free_bytes`: what its host, or its container, has left, `release`: of its
    program, `reads`: oldest and newest version that it reads, by format.
    """

    name: str
    beat_at: float
    serving: str | None
    held_generations: tuple[str, ...]
    epoch: int | None = None
    ready: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    swapped_at: float | None = None
    warm_s: float | None = None
    l2_p99_ms: float | None = None
    canary: Mapping[str, Any] | None = None
    overlay_ttl_s: float | None = None
    memory_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    release: str = FIRST_RELEASE
    reads: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def from_beat(cls, raw: bytes, beat_at: float) -> "Replica":
        """Reads a heartbeat's payload; raises ValueError, TypeError, KeyError or AttributeError for anything else.

        UnknownFormat for one of another release.
        """
        data = orjson.loads(raw)
        demand(HEARTBEAT, version_of(data), f"replica {data['replica']}")
        return cls(
            str(data["replica"]), beat_at, data.get("serving"), tuple(data.get("holds", ())),
            data.get("epoch"), tuple(data.get("ready", ())), data.get("failed") or {},
            data.get("swapped_at"), data.get("warm_s"), data.get("l2_p99_ms"), data.get("canary"),
            data.get("overlay_ttl_s"), data.get("memory_available_bytes"), data.get("disk_free_bytes"),
            str(data.get("release", FIRST_RELEASE)),
            {
                name: (int(oldest), int(newest_version))
                for name, (oldest, newest_version) in data.get("reads", {}).items()
            },
        )  # fmt: skip


# Allowed at full memory: publishing and rolling back must work exactly when Redis is in trouble. An own attempt
# found in place, under a later epoch than the mover saw, means that the reply to an earlier, successful call was lost.
# The rows are looked at here because a retirement or a refusal may have come in since the mover looked: 2 = the
# target may not, 0 = look again. What a roll back jumps over may be retired by now: that row is final.
_MOVE_SCRIPT = """#!lua flags=allow-oom
local found = redis.call('GET', KEYS[1])
local to = cjson.decode(ARGV[2])
local function canary_of(pointer)
  if type(pointer.canary) ~= 'table' then return '' end
  return pointer.canary.generation .. ' ' .. pointer.canary.percent
end
if found then
  local pointer = cjson.decode(found)
  if string.format('%.0f', pointer.epoch) ~= ARGV[1] then
    local is_own = pointer.attempt == to.attempt and pointer.generation == to.generation
    if is_own and canary_of(pointer) == canary_of(to) and pointer.epoch > tonumber(ARGV[1]) then
      return {1, found}
    end
    return {0, found}
  end
elseif ARGV[1] ~= '0' then
  return {0, ''}
end
local function state_of(generation)
  local row = redis.call('HGET', KEYS[2], generation)
  return row and cjson.decode(row).state or 'unknown'
end
local state = state_of(to.generation)
if state == 'retired' then return {2, state, to.generation} end
if ARGV[3] ~= '' and not string.find(ARGV[3], ' ' .. state .. ' ', 1, true) then
  return {2, state, to.generation}
end
if type(to.canary) == 'table' and state_of(to.canary.generation) ~= 'verified' then
  return {2, state_of(to.canary.generation), to.canary.generation}
end
if type(to.previous) == 'string' and state_of(to.previous) == 'retired' then return {0, found or ''} end
redis.call('SET', KEYS[1], ARGV[2])
for i = 4, #ARGV, 2 do
  local was = state_of(ARGV[i])
  local is_gone = was == 'unknown' and cjson.decode(ARGV[i + 1]).state == 'rolled_back'
  if was ~= 'retired' and not is_gone then redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
end
redis.call('PUBLISH', KEYS[3], 'pointer')
return {1, ARGV[2]}
"""

# Rows change only while the pointer is the one that the writer looked at; a retired row is final.
_WRITE_ROWS_SCRIPT = """#!lua flags=allow-oom
local found = redis.call('GET', KEYS[1])
local pointer = found and cjson.decode(found)
if (pointer and string.format('%.0f', pointer.epoch) or '0') ~= ARGV[1] then return 0 end
for i = 3, #ARGV, 2 do
  if pointer and ARGV[2] ~= '' then
    if pointer.generation == ARGV[i] then return 2 end
    if type(pointer.canary) == 'table' and pointer.canary.generation == ARGV[i] then return 2 end
    if ARGV[2] == 'previous' and pointer.previous == ARGV[i] then return 2 end
  end
end
for i = 3, #ARGV, 2 do
  local row = redis.call('HGET', KEYS[2], ARGV[i])
  local final = row and cjson.decode(row).state == 'retired'
  if not final or cjson.decode(ARGV[i + 1]).state == 'retired' then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  end
end
return 1
"""


class Control:
    """Reads and writes one namespace's control keys."""

    def __init__(self, client: "redis.Redis", keys: Keyspace) -> None:
        self.client = client
        self.keys = keys
        self._logged_payloads: set[bytes] = set()

    def pointer(self) -> Pointer | None:
        """Read the pointer to the live generation, None if Redis lost it; raise CorruptArtefact if it is malformed."""
        raw: Any = self.client.get(self.keys.live)
        try:
            return None if raw is None else Pointer.from_bytes(raw)
        except UnknownFormat as error:
            raise UnknownFormat(f"the key {self.keys.live}: {error.message}") from error
        except CorruptArtefact as error:
            raise CorruptArtefact(
                f"the key {self.keys.live} holds no pointer of Larder ({error.message}): run "
                '`larder restore --adopt --reason "..."`, which replaces it',
                key=self.keys.live,
            ) from error

    def move(
        self,
        to: Pointer,
        *,
        expected_epoch: int,
        rows: Mapping[str, RegistryRow],
        allowed: Collection[State] = (),
    ) -> Pointer | None:
        """Compare-and-set: the pointer now in place if the move took effect (now or by an earlier try), else None.

        Raises Conflict when the target's row is retired or in none of the `allowed` states, and when a canary's is
        not verified.
        """
        states = f" {' '.join(sorted(allowed))} " if allowed else ""
        arguments: list[Any] = [str(expected_epoch), to.to_bytes(), states]
        for generation, row in rows.items():
            arguments += [generation, row.to_bytes()]
        names = (self.keys.live, self.keys.generations, self.keys.channel)
        reply: Any = self.client.eval(_MOVE_SCRIPT, len(names), *names, *arguments)
        checked_reply("EVAL", reply, POINTER_MOVE_SHAPE)
        moved, raw = reply[:2]
        if moved == 2:
            state, generation = (each.decode(errors="replace") for each in reply[1:3])
            attempted_move = "made live" if generation == to.generation else "tried out"
            raise Conflict(
                f"{generation} cannot be {attempted_move}: it is {state} by now",
                generation=generation,
                state=state,
            )
        return Pointer.from_bytes(raw) if moved else None

    def write_rows(
        self,
        rows: Mapping[str, RegistryRow],
        *,
        expected_epoch: int,
        unless: Literal["", "live", "previous"] = "",
    ) -> bool:
        """Write rows if the pointer is still of this epoch (0: there is none), else False; retired ones stay so.

        Raises Conflict when the pointer names one of them as live or canary (or, with "previous", as that).
        """
        arguments: list[Any] = [str(expected_epoch), unless]
        for generation, row in rows.items():
            arguments += [generation, row.to_bytes()]
        names = (self.keys.live, self.keys.generations)
        marked = checked_reply(
            "EVAL",
            self.client.eval(_WRITE_ROWS_SCRIPT, len(names), *names, *arguments),
            COUNT_SHAPE,
        )
        if marked == 2:
            raise Conflict(f"the pointer names one of {', '.join(rows)}: readers depend on it")
        return bool(marked)

    def rows(self) -> dict[str, RegistryRow]:
        """The whole registry; raises CorruptArtefact for a row that cannot be read."""
        raw: Any = self.client.hgetall(self.keys.generations)
        rows_by_generation = {}
        for name, value in raw.items():
            generation = name.decode(errors="replace")
            try:
                rows_by_generation[generation] = RegistryRow.from_bytes(value)
            except UnknownFormat as error:
                raise UnknownFormat(f"{generation}: {error.message}") from error
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CorruptArtefact(
                    f"the registry row of {generation} in namespace {self.keys.namespace} cannot be read "
                    f"({type(error).__name__}: {error}): remove it with `redis-cli HDEL {self.keys.generations} "
                    f"{generation}`, then run `larder restore`",
                    key=self.keys.generations,
                    generation=generation,
                ) from error
        return rows_by_generation

    def set_row(self, generation: str, row: RegistryRow) -> None:
        """Write one row."""
        self.client.hset(self.keys.generations, generation, row.to_bytes())

    def drop_row(self, generation: str) -> None:
        """Forget a generation; only when no overlay of it can still live."""
        self.client.hdel(self.keys.generations, generation)

    def announce(self, topic: Literal["pointer", "blocklist", "experiments"]) -> None:
        """Publish a topic, so that listening replicas poll now instead of at their next interval."""
        self.client.publish(self.keys.channel, topic)

    def time(self) -> float:
        """Redis' own clock, Unix seconds: what heartbeats and staging notes are compared with."""
        seconds, microseconds = client_for_key(self.client, self.keys.live).time()
        return float(seconds) + float(microseconds) / 1e6

    def replicas(self, now: float | None = None) -> list[Replica]:
        """Return the replicas that have not missed three beats; skip, and log once, a value that is no heartbeat."""
        return self.replicas_under(self.keys.replicas, self.time() if now is None else now)

    def replicas_under(self, key: str, now: float) -> list[Replica]:
        """Return the replicas whose heartbeats are under `key`, such as the key of an older version."""
        raw: Any = self.client.zrangebyscore(
            key, now - REPLICA_DEAD_S, now + REPLICA_DEAD_S, withscores=True
        )
        found: dict[str, Replica] = {}
        for value, beat_at in raw:
            try:
                replica = Replica.from_beat(value, float(beat_at))
            except (ValueError, TypeError, KeyError, AttributeError):
                if value not in self._logged_payloads:
                    self._logged_payloads.add(value)
                    log.warning("%s holds what is no heartbeat: %.80r", key, value)
                continue
            found[replica.name] = replica
        return list(found.values())

    def silent_replicas(self, now_s: float | None = None) -> int:
        """Number of heartbeats of the last day whose replicas have missed three beats since."""
        now_s = self.time() if now_s is None else now_s
        # ZCOUNT is not among the rights that infra/redis.conf gives the loader.
        silent: Any = self.client.zrangebyscore(
            self.keys.replicas, now_s - REPLICA_FORGOTTEN_S, f"({now_s - REPLICA_DEAD_S!r}"
        )
        return len(silent)

    def forget_dead_replicas(
        self, now_s: float | None = None, after_s: float = REPLICA_FORGOTTEN_S
    ) -> int:
        """Drop heartbeats older than a day or ahead of Redis' clock; a living replica returns with its next beat."""
        now_s = self.time() if now_s is None else now_s
        remove: Any = self.client.zremrangebyscore
        ahead = f"({now_s + REPLICA_DEAD_S!r}"
        return int(remove(self.keys.replicas, "-inf", now_s - after_s)) + int(
            remove(self.keys.replicas, ahead, "+inf")
        )

    def check_policy(self) -> str:
        """The eviction policy (of a cluster, the first node's); refuses one that could evict published pages."""
        policies = {name: _policy(server) for name, server in primary_clients(self.client).items()}
        for name, policy in policies.items():
            if not policy.startswith(("volatile-", "noeviction")):
                where = "" if name == "primary" else f" ({name})"
                raise Refused(
                    f"Redis{where} has maxmemory-policy {policy or 'unknown'}, which may evict published pages; set "
                    "volatile-lru",
                    rule="maxmemory_policy",
                    value=policy,
                    threshold="volatile-* or noeviction",
                )
        return next(iter(policies.values()))


def _policy(server: "redis.Redis") -> str:
    try:
        raw: Any = server.config_get("maxmemory-policy")
        return str(raw.get("maxmemory-policy", ""))
    except redis.exceptions.RedisError:  # managed services forbid CONFIG; INFO says it as well
        info: Any = server.info("memory")
        return str(info.get("maxmemory_policy", ""))


def written_versions() -> dict[str, int]:
    """Return, by format, the versions that a night of this release writes and replicas read."""
    return {
        format_spec.name: format_spec.written
        for format_spec in FORMATS.values()
        if format_spec.is_served
    }


def demand_readers(
    control: Control, version_by_format: Mapping[str, int], writer_clause: str
) -> None:
    """Raises Refused, naming a live replica that cannot read one of the versions; `writer_clause` lists them."""
    for replica in (*control.replicas(), *_under_older_keys(control)):
        for name, version in version_by_format.items():
            oldest, newest_version = replica.reads.get(name, FIRST_VERSIONS)
            if not oldest <= version <= newest_version:
                reads = (
                    str(newest_version)
                    if oldest == newest_version
                    else f"{oldest} to {newest_version}"
                )
                remedy = (
                    "upgrade the services first, or stop this one"
                    if version > newest_version
                    else f"run a night with Larder {replica.release}, or stop this one"
                )
                raise Refused(
                    f"replica {replica.name} (Larder {replica.release}) reads {name} format {reads}, {writer_clause} "
                    f"{version}: "
                    f"nothing was moved; {remedy}",
                    rule="formats", value=reads, threshold=version, replica=replica.name, format=name,
                )  # fmt: skip


def demand_readers_of_night(control: Control) -> None:
    """Raise Refused unless every live replica reads all formats that a night of this release writes."""
    demand_readers(control, written_versions(), f"a night of this release ({RELEASE}) writes")


def _under_older_keys(control: Control) -> list[Replica]:
    """Return live replicas that beat under keys of an older version; they cannot read this release's pointer."""
    found: list[Replica] = []
    now_s = control.time()
    for version in range(FORMATS[KEYS].oldest_readable, FORMATS[KEYS].written):
        found += control.replicas_under(control.keys.replicas_of(version), now_s)
    return found
