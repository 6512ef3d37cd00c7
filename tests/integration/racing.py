"""One process of a race: random operations on releases over a real Redis, until it is told to stop."""

import random
import re
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import redis

from cache.control.control_keys import Control
from cache.control.states import GenerationState, demand_allowed
from cache.errors import Conflict, LarderError
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.releases import Pointer
from precompute.bulk.reload import reload
from precompute.releases import moves
from precompute.releases.recovery import restore_redis
from precompute.releases.release_log import Releases
from precompute.releases.sweep import drop_old_rows, retire, unneeded_generations
from serving.generations.pointer_follower import judge_pointer

NIGHTS = tuple(
    f"2026{month:02}{day:02}T{hour:02}0000Z-{'c' * 12}"
    for month in range(1, 13)
    for day in range(1, 28)
    for hour in range(24)
)
NEAR = 5
"""How many nights around the live one are raced for."""
_DIGITS = re.compile(r"\d[\w-]*")
Make = Callable[[Releases, str], None]


class Racer:
    """Publishers, operators and sweeps in random order, each with its own connection."""

    def __init__(self, url: str, folder: Path, keys: Keyspace, number: int, seed: int) -> None:
        self.rng, self.number, self.keys = random.Random(f"{seed}/{number}"), number, keys
        self.client = redis.Redis.from_url(url, protocol=3, socket_timeout=10.0)
        self.releases = Releases(ArtefactStore(str(folder)), Control(self.client, keys))
        self.counts: dict[str, int] = {}
        self.attempts = 0

    def race(self, stop: Any, make: Make) -> dict[str, int]:
        """Run; return how often each operation happened, and what was not allowed."""
        actions: tuple[tuple[Callable[[Make], None], int], ...] = (
            (self._night, 6), (self._roll_back, 2), (self._retire, 2), (self._restore, 4), (self._pin, 1),
            (self._canary, 2), (self._retry, 1),
        )  # fmt: skip
        weights = [weight for _, weight in actions]
        while not stop.is_set():
            act = self.rng.choices([action for action, _ in actions], weights)[0]
            try:
                act(make)
            except (LarderError, redis.exceptions.RedisError) as error:
                self._count(f"{act.__name__}: {_DIGITS.sub('#', str(error))[:70]}")
            else:
                self._count(act.__name__)
        self.client.close()
        return self.counts

    def _count(self, outcome: str) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + 1

    def _attempt(self) -> str:
        self.attempts += 1
        return f"racer-{self.number}-{self.attempts}"

    def _live_index(self) -> int:
        pointer = self.releases.control.read_pointer()
        return -1 if pointer is None else NIGHTS.index(pointer.generation)

    def _near(self, first: int) -> list[str]:
        """Return the next nights from one on, without retired ones, which are never made again."""
        states = self.releases.view().ledger.state_by_generation
        unretired_generations = (
            generation
            for generation in NIGHTS[max(0, first) :]
            if states.get(generation) is not GenerationState.RETIRED
        )
        return list(islice(unretired_generations, NEAR))

    def _night(self, make: Make) -> None:
        generation = self.rng.choice(self._near(self._live_index() - 2))
        self.prepare(generation, make)
        moves.publish(self.releases, generation, attempt=self._attempt())

    def prepare(self, generation: str, make: Make) -> None:
        releases = self.releases
        state = releases.state(generation)
        if state in (GenerationState.LIVE, GenerationState.SUPERSEDED):
            return
        demand_allowed("begin", generation, state)
        if state is None:
            releases.note(generation, GenerationState.BEGUN)
        if releases.store.read(generation_path(generation, "manifest.json")) is None:
            make(releases, generation)
        reload(releases.control, releases.store, generation)
        releases.note(generation, GenerationState.LOADED)
        if self.rng.random() < 0.15:
            moves.refuse(releases, generation, reason="bad", attempt=self._attempt())
            raise Conflict("refused")
        releases.mark_verified(generation, attempt=self._attempt())

    def _roll_back(self, _make: Make) -> None:
        moves.roll_back(self.releases, target_generation=None, reason="bad", attempt=self._attempt())

    def _retire(self, _make: Make) -> None:
        for generation in unneeded_generations(self.releases, kept_generations=1, grace_s=0.5):
            retire(self.releases, generation, attempt=self._attempt(), grace_s=0.5)
        drop_old_rows(self.releases, overlay_ttl_s=2.0, kept_s=0.0)

    def _restore(self, _make: Make) -> None:
        restore_redis(self.releases, attempt=self._attempt(), chunk_bytes=1 << 16)

    def _pin(self, _make: Make) -> None:
        generation = NIGHTS[max(0, self._live_index())]
        self.releases.pin(generation, reason="audit", expires_at=time.time() + 0.5, attempt=self._attempt())

    def _canary(self, make: Make) -> None:
        if self.releases.ledger().canary is not None:
            moves.end_canary(self.releases, self._attempt(), "enough", self.rng.random() < 0.3)
            return
        generation = self.rng.choice(self._near(self._live_index() + 1))
        self.prepare(generation, make)
        moves.start_canary(self.releases, generation, 5.0, self._attempt())

    def _retry(self, _make: Make) -> None:
        pointer = self.releases.control.read_pointer()
        if pointer is not None:
            moves.publish(self.releases, pointer.generation, attempt=pointer.attempt)


def race(
    url: str, folder: Path, keys: Keyspace, number: int, seed: int, stop: Any, make: Make, ready: Any
) -> dict[str, int]:
    """Run `Racer.race` in a process."""
    racer = Racer(url, folder, keys, number, seed)
    ready.wait(60)
    return racer.race(stop, make)


def follow(url: str, keys: Keyspace, stop: Any, ready: Any) -> list[tuple[str, int, str | None]]:
    """Return what a reader followed, in order: generation, epoch and previous."""
    followed: list[tuple[str, int, str | None]] = []
    followed_pointer: Pointer | None = None
    with redis.Redis.from_url(url, protocol=3, socket_timeout=10.0) as client:
        control = Control(client, keys)
        ready.wait(60)
        while not stop.is_set():
            try:
                pointer = control.read_pointer()
            except redis.exceptions.RedisError:
                continue
            if pointer is not None and judge_pointer(pointer, followed_pointer) == "newer":
                followed_pointer = pointer
                followed.append((pointer.generation, pointer.epoch, pointer.previous))
            time.sleep(0.001)
    return followed
