"""Staging: asks replicas to hold a generation ready before the pointer moves, and waits until they do."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from cache.config.night import FlipConfig
from cache.control.control_keys import REPLICA_DEAD_S, Control, Replica, Staging
from cache.errors import Conflict
from cache.l2.resp import TEXT_OR_NOTHING_SHAPE, checked_reply
from precompute.config.progress import Progress, quiet

LEASE_S = 60.0
"""Seconds that replicas hold a generation for a publisher that no longer renews its note."""
RENEW_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.05

# One publisher at a time. Another's note may be replaced once it has expired, or once its generation is in the pointer:
# then its publisher died between the move and the removal of the note.
_STAGE_SCRIPT = """#!lua flags=allow-oom
local found = redis.call('GET', KEYS[1])
if found then
  local note = cjson.decode(found)
  local live = redis.call('GET', KEYS[3])
  local pointer = live and cjson.decode(live) or {}
  local tried = type(pointer.canary) == 'table' and pointer.canary.generation
  local mine = note.attempt == ARGV[1] or note.generation == ARGV[2]
  local moved = note.generation == pointer.generation or note.generation == tried
  if not mine and not moved and note['until'] > tonumber(ARGV[3]) then return found end
end
redis.call('SET', KEYS[1], ARGV[4])
if not found or cjson.decode(found).generation ~= ARGV[2] then redis.call('PUBLISH', KEYS[2], 'next') end
return false
"""

_UNSTAGE_SCRIPT = """#!lua flags=allow-oom
local found = redis.call('GET', KEYS[1])
local note = found and cjson.decode(found)
if note and (note.attempt == ARGV[1] or note.generation == ARGV[2]) then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', KEYS[2], 'next')
end
return 0
"""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Live replicas that are ready for a generation, and those that are not."""

    ready_replicas: tuple[Replica, ...]
    waiting_replicas: tuple[Replica, ...]

    @classmethod
    def of(cls, generation: str, replicas: Sequence[Replica]) -> "Readiness":
        """Sort replicas by whether their last heartbeats report the generation as ready."""
        ready = tuple(replica for replica in replicas if generation in replica.ready_generations)
        return cls(ready, tuple(replica for replica in replicas if replica not in ready))

    def is_enough(self, flip: FlipConfig, *, is_over: bool) -> bool:
        """True if all live replicas, and at least the minimum, are ready.

        Once the wait `is_over`, a configured minimum suffices.
        """
        if len(self.ready_replicas) < flip.replicas_min:
            return False
        return not self.waiting_replicas or (is_over and flip.replicas_min > 0)

    def describe_waiting(self, generation: str) -> str:
        """Return the names of replicas that are not ready, each with its reason, as text."""
        reasons = [
            f"{replica.name}: {replica.failure_by_generation.get(generation, 'still loading')}"
            for replica in self.waiting_replicas
        ]
        return "; ".join(reasons) or "no other replica is alive"


class StagingNote:
    """Staging note of one namespace."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def set(self, generation: str, attempt: str, *, lease_s: float = LEASE_S) -> Staging | None:
        """Write or renew the note for a generation; return another publisher's note if that blocks it, else None."""
        noted_at = self._control.time()
        note = Staging(generation, attempt, noted_at + lease_s)
        keys = self._control.keyspace
        blocking_note: Any = self._control.client.eval(
            _STAGE_SCRIPT, 3, keys.staging_note, keys.channel, keys.live,
            attempt, generation, str(noted_at), note.to_bytes(),
        )  # fmt: skip
        checked_reply("EVAL", blocking_note, TEXT_OR_NOTHING_SHAPE)
        return None if blocking_note is None else Staging.from_bytes(blocking_note)

    def clear(self, attempt: str, generation: str = "") -> None:
        """Remove this attempt's staging note, or any publisher's note for `generation`."""
        keys = self._control.keyspace
        self._control.client.eval(_UNSTAGE_SCRIPT, 2, keys.staging_note, keys.channel, attempt, generation)

    def get(self) -> Staging | None:
        """Return the current note; None if there is none or it has expired."""
        raw_note: Any = self._control.client.get(self._control.keyspace.staging_note)
        note = None if raw_note is None else Staging.from_bytes(raw_note)
        return None if note is None or note.until <= self._control.time() else note


@contextmanager
def staged(
    control: Control,
    generation: str,
    flip: FlipConfig,
    *,
    attempt: str,
    progress: Progress = quiet,
    lease_s: float = LEASE_S,
) -> Iterator[Readiness]:
    """Hold the generation ready on all live replicas during the block; raise Conflict naming unready replicas.

    Without any live replica, and without a configured minimum, it does not wait. Dead replicas are removed from the
    registry. The note is removed afterwards, or expires.
    """
    staging_note = StagingNote(control)
    started_at, renew_at, rival_staging = time.monotonic(), 0.0, None
    try:
        while True:
            checked_at = control.time()
            control.forget_dead_replicas(checked_at, silence_max_s=REPLICA_DEAD_S)
            readiness = Readiness.of(generation, control.replicas(checked_at))
            replica_count = len(readiness.ready_replicas) + len(readiness.waiting_replicas)
            if not replica_count and not flip.replicas_min:
                break
            if time.monotonic() >= renew_at:
                rival_staging = staging_note.set(generation, attempt, lease_s=lease_s)
                renew_at = time.monotonic() + RENEW_INTERVAL_S
            is_over = time.monotonic() - started_at >= flip.wait_s
            if rival_staging is None and readiness.is_enough(flip, is_over=is_over):
                break
            if is_over:
                raise _staging_conflict(generation, flip, readiness, rival_staging)
            progress("replicas ready", len(readiness.ready_replicas), max(replica_count, flip.replicas_min))
            time.sleep(POLL_INTERVAL_S)
        yield readiness
    finally:
        with contextlib.suppress(redis.exceptions.RedisError):
            staging_note.clear(attempt)


def _staging_conflict(
    generation: str, flip: FlipConfig, readiness: Readiness, rival_staging: Staging | None
) -> Conflict:
    if rival_staging is not None:
        return Conflict(
            f"{generation} was not published: {rival_staging.attempt} has been publishing {rival_staging.generation} "
            "for more than "
            f"{flip.wait_s:g} s; try again when it is done",
            generation=generation,
        )
    replica_count = len(readiness.ready_replicas) + len(readiness.waiting_replicas)
    return Conflict(
        f"{generation} was not published: after {flip.wait_s:g} s {len(readiness.ready_replicas)} of "
        f"{replica_count} live "
        "replicas are "
        f"ready, {flip.replicas_min or 'all'} must be ({readiness.describe_waiting(generation)}); repair or stop "
        "them, or set "
        "[flip] replicas_min to publish without them",
        generation=generation,
        ready=[replica.name for replica in readiness.ready_replicas],
        waiting=[replica.name for replica in readiness.waiting_replicas],
    )
