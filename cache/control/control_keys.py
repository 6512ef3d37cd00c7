"""Values of the control keys in Redis (pointer, registry, heartbeats, staging note), and the moves of the pointer."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import orjson
import redis

from cache.control.states import GenerationState
from cache.errors import Conflict, CorruptArtefact, Refused, UnknownFormat
from cache.format.redis_keys import Keyspace
from cache.formats import (
    FIRST_RELEASE,
    FORMAT_FIELD,
    FORMATS,
    HEARTBEAT,
    KEYS,
    POINTER,
    REGISTRY_ROW,
    RELEASE_RECORD,
    STAGING_NOTE,
    THIS_RELEASE,
    demand_readable,
    version_of,
    version_stamp,
)
from cache.l2.resp import COUNT_SHAPE, POINTER_MOVE_SHAPE, checked_reply
from cache.l2.sync_clients import client_for_key, primary_clients
from cache.store.releases import Pointer

REPLICA_DEAD_S = 3.0
"""Seconds without a heartbeat (three missed beats) after which a replica counts as gone; so does one whose heartbeat is
as far in the future."""

REPLICA_FORGOTTEN_S = 86_400.0
"""Seconds without a heartbeat after which a replica is removed from the set."""

FIRST_VERSION_RANGE = (1, 1)
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
        return orjson.dumps({**asdict(self), **version_stamp(STAGING_NOTE)})

    @classmethod
    def from_bytes(cls, staging_bytes: bytes) -> Self:
        """Parse the result of `to_bytes`; raise CorruptArtefact for anything else."""
        try:
            data = orjson.loads(staging_bytes)
            demand_readable(STAGING_NOTE, version_of(data))
            data.pop(FORMAT_FIELD, None)
            note = cls(**data)
            if not (isinstance(note.generation, str) and isinstance(note.until, int | float)):
                raise TypeError("generation must be a string, until a number")
        except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
            raise CorruptArtefact(f"not a staging note: {error}") from error
        return note


@dataclass(frozen=True, slots=True)
class RegistryRow:
    """A generation's row in the registry; `at` is Unix seconds."""

    state: GenerationState
    at: float
    reason: str = ""

    def to_bytes(self) -> bytes:
        """JSON as stored in Redis."""
        fields = {"state": self.state, "at": self.at, "reason": self.reason}
        return orjson.dumps(fields | version_stamp(REGISTRY_ROW))

    @classmethod
    def from_bytes(cls, row_bytes: bytes) -> "RegistryRow":
        """Parse the result of `to_bytes`; raise ValueError, TypeError, KeyError or AttributeError for anything else.

        Raises UnknownFormat for a row of another release's format.
        """
        row_fields = orjson.loads(row_bytes)
        demand_readable(REGISTRY_ROW, version_of(row_fields))
        return cls(GenerationState(row_fields["state"]), float(row_fields["at"]), str(row_fields.get("reason", "")))


@dataclass(frozen=True, slots=True)
class Replica:
    """A serving replica's last heartbeat; times are Redis' own, Unix seconds.

    `ready_generations`: loaded and warmed generations. `failure_by_generation`: generation -> why the replica
    cannot load it. `degraded`: why its live model does not work. `stale_reasons`: why its answers may lag behind.
    `problem_by_feature`: what is wrong with tokens, TLS files or events.
    `blocklist_version`: newest version of the blocklist that it has read. `l2_p99_ms`: latency over the last few
    seconds.
    `canary_counts`: the replica's counts while a canary runs. `overlay_ttl_s`: longest life of its overlays.
    `memory_available_bytes`, `disk_free_bytes`: what is left on its host, or in its container. `release`: release
    of its program. `readable_versions`: oldest and newest version that it reads, by format.
    """

    name: str
    beat_at: float
    served_generation: str | None
    held_generations: tuple[str, ...]
    pointer_epoch: int | None = None
    ready_generations: tuple[str, ...] = ()
    failure_by_generation: Mapping[str, str] = field(default_factory=dict)
    swapped_at: float | None = None
    warm_up_s: float | None = None
    l2_p99_ms: float | None = None
    canary_counts: Mapping[str, Any] | None = None
    overlay_ttl_s: float | None = None
    memory_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    release: str = FIRST_RELEASE
    readable_versions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    degraded: str | None = None
    stale_reasons: tuple[str, ...] = ()
    blocklist_version: int | None = None
    problem_by_feature: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_beat(cls, heartbeat_bytes: bytes, beat_at: float) -> "Replica":
        """Parse a heartbeat's payload; raise ValueError, TypeError, KeyError or AttributeError for anything else.

        Raises UnknownFormat for a heartbeat of another release's format.
        """
        heartbeat_fields = orjson.loads(heartbeat_bytes)
        demand_readable(HEARTBEAT, version_of(heartbeat_fields), f"replica {heartbeat_fields['replica']}")
        return cls(
            str(heartbeat_fields["replica"]), beat_at, heartbeat_fields.get("serving"),
            tuple(heartbeat_fields.get("holds", ())),
            heartbeat_fields.get("epoch"), tuple(heartbeat_fields.get("ready", ())),
            heartbeat_fields.get("failed") or {},
            heartbeat_fields.get("swapped_at"), heartbeat_fields.get("warm_s"), heartbeat_fields.get("l2_p99_ms"),
            heartbeat_fields.get("canary"),
            heartbeat_fields.get("overlay_ttl_s"), heartbeat_fields.get("memory_available_bytes"),
            heartbeat_fields.get("disk_free_bytes"),
            str(heartbeat_fields.get("release", FIRST_RELEASE)),
            {
                name: (int(oldest), int(newest_version))
                for name, (oldest, newest_version) in heartbeat_fields.get("reads", {}).items()
            },
            heartbeat_fields.get("degraded"),
            tuple(str(heartbeat_fields["stale"]).split(",")) if heartbeat_fields.get("stale") else (),
            heartbeat_fields.get("blocklist_version"),
            {str(name): str(problem) for name, problem in (heartbeat_fields.get("problems") or {}).items()},
        )  # fmt: skip


# Allowed at maxmemory, because publishing and rolling back must work when Redis is in trouble. If the pointer already
# holds this attempt under a later epoch than expected, an earlier call succeeded and its reply was lost. The rows are
# checked here because a retirement or refusal may have happened since the caller read them. Results: 1 = moved, 2 = the
# target's state forbids the move, 0 = read again. A retired row is final and is not overwritten, for example by a roll
# back.
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

# Rows change only while the pointer has the epoch that the caller read; a retired row is final.
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

    def __init__(self, client: "redis.Redis", keyspace: Keyspace) -> None:
        self.client = client
        self.keyspace = keyspace
        self._logged_payloads: set[bytes] = set()

    def read_pointer(self) -> Pointer | None:
        """Read the pointer to the live generation, None if Redis lost it; raise CorruptArtefact if it is malformed."""
        pointer_bytes: Any = self.client.get(self.keyspace.live)
        try:
            return None if pointer_bytes is None else Pointer.from_bytes(pointer_bytes)
        except UnknownFormat as error:
            raise UnknownFormat(f"the key {self.keyspace.live}: {error.message}") from error
        except CorruptArtefact as error:
            raise CorruptArtefact(
                f"the key {self.keyspace.live} holds no pointer of Larder ({error.message}): run "
                '`larder restore --adopt --reason "..."`, which replaces it',
                key=self.keyspace.live,
            ) from error

    def move_pointer(
        self,
        target_pointer: Pointer,
        *,
        expected_epoch: int,
        row_by_generation: Mapping[str, RegistryRow],
        allowed_states: Collection[GenerationState] = (),
    ) -> Pointer | None:
        """Compare-and-set the pointer; return it if the move took effect (now or in an earlier try), else None.

        Raises Conflict if the target's row is retired or in none of the `allowed_states`, or if the row of its canary
        is not verified.
        """
        states = f" {' '.join(sorted(allowed_states))} " if allowed_states else ""
        script_arguments: list[Any] = [str(expected_epoch), target_pointer.to_bytes(), states]
        for generation, row in row_by_generation.items():
            script_arguments += [generation, row.to_bytes()]
        keys = (self.keyspace.live, self.keyspace.generations, self.keyspace.channel)
        script_reply: Any = self.client.eval(_MOVE_SCRIPT, len(keys), *keys, *script_arguments)
        checked_reply("EVAL", script_reply, POINTER_MOVE_SHAPE)
        outcome_code, pointer_bytes = script_reply[:2]
        if outcome_code == 2:
            state, generation = (reply_text.decode(errors="replace") for reply_text in script_reply[1:3])
            attempted_move = "made live" if generation == target_pointer.generation else "tried out"
            raise Conflict(
                f"{generation} cannot be {attempted_move}: its state is now {state}", generation=generation, state=state
            )
        return Pointer.from_bytes(pointer_bytes) if outcome_code else None

    def write_rows(
        self,
        row_by_generation: Mapping[str, RegistryRow],
        *,
        expected_epoch: int,
        unless_named_as: Literal["", "live", "previous"] = "",
    ) -> bool:
        """Write rows if the pointer still has this epoch (0: there is no pointer), else return False.

        Retired rows are final. With `unless_named_as`, raises Conflict if the pointer names one of these generations as
        live or canary (with "previous", also as the previous one).
        """
        script_arguments: list[Any] = [str(expected_epoch), unless_named_as]
        for generation, row in row_by_generation.items():
            script_arguments += [generation, row.to_bytes()]
        keys = (self.keyspace.live, self.keyspace.generations)
        outcome_code = checked_reply(
            "EVAL", self.client.eval(_WRITE_ROWS_SCRIPT, len(keys), *keys, *script_arguments), COUNT_SHAPE
        )
        if outcome_code == 2:
            raise Conflict(f"the pointer names one of {', '.join(row_by_generation)}, which readers use")
        return bool(outcome_code)

    def rows(self) -> dict[str, RegistryRow]:
        """Return the whole registry by generation; raise CorruptArtefact for a row that cannot be read."""
        row_by_field: Any = self.client.hgetall(self.keyspace.generations)
        rows_by_generation = {}
        for raw_generation, row_bytes in row_by_field.items():
            generation = raw_generation.decode(errors="replace")
            try:
                rows_by_generation[generation] = RegistryRow.from_bytes(row_bytes)
            except UnknownFormat as error:
                raise UnknownFormat(f"{generation}: {error.message}") from error
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CorruptArtefact(
                    f"the registry row of {generation} in namespace {self.keyspace.namespace} cannot be read "
                    f"({type(error).__name__}: {error}): remove it with `redis-cli HDEL {self.keyspace.generations} "
                    f"{generation}`, then run `larder restore`",
                    key=self.keyspace.generations,
                    generation=generation,
                ) from error
        return rows_by_generation

    def set_row(self, generation: str, row: RegistryRow) -> None:
        """Write one row."""
        self.client.hset(self.keyspace.generations, generation, row.to_bytes())

    def drop_row(self, generation: str) -> None:
        """Remove a generation's row; call only when none of its overlays can still exist."""
        self.client.hdel(self.keyspace.generations, generation)

    def announce(self, topic: Literal["pointer", "blocklist", "experiments"]) -> None:
        """Publish a topic on the channel, so that listening replicas poll at once."""
        self.client.publish(self.keyspace.channel, topic)

    def time(self) -> float:
        """Return Redis' clock in Unix seconds, with which heartbeats and staging notes are compared."""
        seconds, microseconds = client_for_key(self.client, self.keyspace.live).time()
        return float(seconds) + float(microseconds) / 1e6

    def replicas(self, now_s: float | None = None) -> list[Replica]:
        """Return the replicas that have not missed three beats; skip a malformed heartbeat and log it once."""
        return self.replicas_under(self.keyspace.replicas, self.time() if now_s is None else now_s)

    def replicas_under(self, heartbeats_key: str, now_s: float) -> list[Replica]:
        """Return the replicas whose heartbeats are under `heartbeats_key`, such as the key of an older version."""
        scored_payloads: Any = self.client.zrangebyscore(
            heartbeats_key, now_s - REPLICA_DEAD_S, now_s + REPLICA_DEAD_S, withscores=True
        )
        replica_by_name: dict[str, Replica] = {}
        for payload, beat_at in scored_payloads:
            try:
                replica = Replica.from_beat(payload, float(beat_at))
            except (ValueError, TypeError, KeyError, AttributeError):
                if payload not in self._logged_payloads:
                    self._logged_payloads.add(payload)
                    log.warning("%s holds a malformed heartbeat: %.80r", heartbeats_key, payload)
                continue
            replica_by_name[replica.name] = replica
        return list(replica_by_name.values())

    def count_silent_replicas(self, now_s: float | None = None) -> int:
        """Return the number of heartbeats of the last day whose replicas have missed three beats since."""
        now_s = self.time() if now_s is None else now_s
        # infra/redis.conf does not grant ZCOUNT to the loader.
        silent_payloads: Any = self.client.zrangebyscore(
            self.keyspace.replicas, now_s - REPLICA_FORGOTTEN_S, f"({now_s - REPLICA_DEAD_S!r}"
        )
        return len(silent_payloads)

    def forget_dead_replicas(self, now_s: float | None = None, silence_max_s: float = REPLICA_FORGOTTEN_S) -> int:
        """Remove heartbeats older than a day or ahead of Redis' clock; a living replica's next beat adds it again."""
        now_s = self.time() if now_s is None else now_s
        remove_by_score: Any = self.client.zremrangebyscore
        score_after_now = f"({now_s + REPLICA_DEAD_S!r}"
        return int(remove_by_score(self.keyspace.replicas, "-inf", now_s - silence_max_s)) + int(
            remove_by_score(self.keyspace.replicas, score_after_now, "+inf")
        )

    def check_eviction_policy(self) -> str:
        """Return the eviction policy (in a cluster, the first node's); raise if it could evict published pages."""
        policies = {name: _read_eviction_policy(server) for name, server in primary_clients(self.client).items()}
        for name, policy in policies.items():
            if not policy.startswith(("volatile-", "noeviction")):
                server_words = "" if name == "primary" else f" ({name})"
                raise Refused(
                    f"Redis{server_words} has maxmemory-policy {policy or 'unknown'}, which may evict published "
                    "pages; set "
                    "volatile-lru",
                    rule="maxmemory_policy",
                    value=policy,
                    threshold="volatile-* or noeviction",
                )
        return next(iter(policies.values()))


def _read_eviction_policy(server: "redis.Redis") -> str:
    try:
        policy_settings: Any = server.config_get("maxmemory-policy")
        return str(policy_settings.get("maxmemory-policy", ""))
    except redis.exceptions.RedisError:  # managed services forbid CONFIG; INFO also has the policy
        memory_info: Any = server.info("memory")
        return str(memory_info.get("maxmemory_policy", ""))


def written_version_by_format() -> dict[str, int]:
    """Return, by format, the versions that a night of this release writes and replicas read."""
    return {
        format_spec.name: format_spec.written_version
        for format_spec in FORMATS.values()
        if format_spec.is_read_by_service
    }


def demand_readers(control: Control, version_by_format: Mapping[str, int], writer_clause: str) -> None:
    """Raise Refused, naming a live replica that cannot read one of the versions.

    `writer_clause` says who writes them.
    """
    for replica in (*control.replicas(), *_replicas_under_older_keys(control)):
        for name, version in version_by_format.items():
            oldest, newest_version = replica.readable_versions.get(name, FIRST_VERSION_RANGE)
            if not oldest <= version <= newest_version:
                readable_range = str(newest_version) if oldest == newest_version else f"{oldest} to {newest_version}"
                remedy = (
                    "upgrade the services first, or stop this one"
                    if version > newest_version
                    else f"run a night with Larder {replica.release}, or stop this one"
                )
                raise Refused(
                    f"replica {replica.name} (Larder {replica.release}) reads {name} format {readable_range}, "
                    f"{writer_clause} "
                    f"{version}: {remedy}",
                    rule="formats", value=readable_range, threshold=version, replica=replica.name, format=name,
                )  # fmt: skip


def demand_readers_of_night(control: Control) -> None:
    """Raise Refused unless every live replica reads all formats that a night of this release writes."""
    demand_readers(control, written_version_by_format(), f"a night of this release ({THIS_RELEASE}) writes")


def _replicas_under_older_keys(control: Control) -> list[Replica]:
    """Return live replicas whose heartbeats are under keys of an older version.

    They cannot read this release's pointer.
    """
    older_replicas: list[Replica] = []
    now_s = control.time()
    for version in range(FORMATS[KEYS].oldest_readable_version, FORMATS[KEYS].written_version):
        older_replicas += control.replicas_under(control.keyspace.replicas_of(version), now_s)
    return older_replicas
