"""One random run of a namespace: operations interleaved at every step, killed, with Redis lost; all rules are checked.

The real release code runs over a store and a Redis in memory. Each operation is a greenlet that may be paused before
any command or file, so publishers, operators and sweeps overlap in every order; one paused for ever was killed.
"""

import contextlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import greenlet
import orjson
import redis

from cache.control.control_keys import REPLICA_DEAD_S, Control
from cache.control.states import GenerationState, demand_allowed, fold_releases
from cache.errors import Conflict, LarderError, UnknownGeneration
from cache.format.manifest import Artefact, DirectoryPart, EntitySet, ItemFiles, Manifest, Producer, Table, TablePart
from cache.format.redis_keys import Keyspace
from cache.records import Layout
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.releases import Pointer, Release, all_releases, newest_release
from precompute.releases import moves
from precompute.releases import recovery as restore_module
from precompute.releases import sweep as sweep_module
from precompute.releases.release_log import Releases
from precompute.releases.replication import VerifyReport
from serving.generations.holder import pointer_of_release
from serving.generations.pointer_follower import judge_pointer
from tests.memory import MemoryRedis, MemoryStore

KEYS = Keyspace("life")
START = 1_800_000_000.0
GENERATIONS = tuple(f"2026010{day}T000000Z-{variant * 12}" for day in range(1, 7) for variant in "ab")
LAST = f"20270101T000000Z-{'0' * 12}"
PAGE = b"x" * 8
GRACE_S = 60.0
OVERLAY_TTL_S = 600.0
NOWHERE = Artefact("none", 0, "")


@dataclass(frozen=True, slots=True)
class Bias:
    """Frequencies in a run: weights of operations and events, and other probabilities."""

    operations: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    killed: float = 0.1
    wiped_when_killed: float = 0.1
    repeated: float = 0.2
    reply_lost: float = 0.02
    steps: int = 60


OPERATIONS = {
    "night": 5, "begin": 1, "load": 1, "verify": 3, "publish": 9, "roll_back": 5, "override": 1, "clear": 1,
    "canary": 3, "end_canary": 2, "pin": 1, "unpin": 1, "retire": 4, "restore": 3, "refuse": 1,
}  # fmt: skip
EVENTS = {
    "later": 6, "much later": 4, "a day later": 1, "clock back": 1, "clock ahead": 1, "cut off": 2, "reconnect": 3,
    "restart": 2, "wipe": 1, "save": 3, "load": 2,
}  # fmt: skip


class Killed(BaseException):
    """The process of an operation was killed."""


class Broken(AssertionError):
    """A rule did not hold; the message has the seed and everything that happened."""


@lru_cache(maxsize=1024)
def manifest_of(generation: str, verdict: int, passed: bool = True) -> bytes:
    """Return a manifest of one table with two pages; `verdict` numbers verifications (0: none yet)."""
    table_part = TablePart(0, 2, 4, NOWHERE, NOWHERE)
    table = Table("t", "user", Producer("none"), Layout("value", 4, "f4"), 2, (table_part,), ())
    return Manifest(
        namespace="life", generation=generation, data_until=0, created_at=int(START), bundle_digest="",
        inputs_digest="", entity_sets={"user": EntitySet("user", 0, 0, (DirectoryPart(0, 0, NOWHERE),))},
        items=ItemFiles(NOWHERE, NOWHERE, NOWHERE, NOWHERE, 0, 0), tables={"t": table}, models={}, indexes={},
        defaults=NOWHERE, gates=({"rule": "any", "passed": passed, "number": verdict},) if verdict else (),
    ).to_bytes()  # fmt: skip


@lru_cache(maxsize=1024)
def _parsed(raw: bytes) -> Manifest:
    return Manifest.from_bytes(raw)


def read_manifest(store: ArtefactStore, generation: str) -> Manifest:
    """Read a manifest as `cache.store.artefacts` does, but parse each text once."""
    raw = store.read(generation_path(generation, "manifest.json"))
    if raw is None:
        raise UnknownGeneration(f"{generation} has no manifest", generation=generation)
    return _parsed(raw)


def page_names(generation: str) -> list[str]:
    """The two pages."""
    return [KEYS.page(generation, "t", page) for page in range(2)]


def load_missing(control: Control, store: ArtefactStore, generation: str, **_options: Any) -> int:
    """Write missing pages to Redis one by one, then their mark."""
    read_manifest(store, generation)
    for name in page_names(generation):
        if control.client.strlen(name) != len(PAGE):
            control.client.set(name, PAGE)
    control.client.hset(KEYS.loaded_parts(generation), "t/0", "mark")
    return 0


@contextlib.contextmanager
def modelled() -> Iterator[None]:
    """Within the block, pages are two short strings; everything else is the production code."""
    names: list[tuple[Any, str, Any]] = [
        (moves, "load_missing", load_missing),
        (moves, "read_manifest", read_manifest),
        (sweep_module, "read_manifest", read_manifest),
        (restore_module, "reload", load_missing),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in names]
    try:
        for owner, name, model in names:
            setattr(owner, name, model)
        yield
    finally:
        for owner, name, real in originals:
            setattr(owner, name, real)


@dataclass(eq=False, slots=True)
class Actor:
    """A running operation; `age` is the number of disasters and `days` that of long waits at its start."""

    name: str
    pauses: float
    age: int
    step: int
    days: int = 0
    about: str | None = None
    running: Any = None


@dataclass(eq=False, slots=True)
class Reader:
    """A replica that follows only greater epochs and reports each second what it holds, unless cut off."""

    name: str
    last_pointer: Pointer | None = None
    held_generations: tuple[str, ...] = ()
    payload: bytes | None = None
    is_cut_off: bool = False
    alive_since: int = 0


class Life:
    """A random run; see the module."""

    def __init__(self, seed: int, bias: Bias = Bias()) -> None:
        self.rng, self.seed, self.bias = random.Random(seed), seed, bias
        self.operations = {**OPERATIONS, **bias.operations}
        self.events = {**EVENTS, **bias.events}
        self.now_s, self.step = START, 0
        self.redis = MemoryRedis(KEYS, lambda: self.now_s, self._pause)
        self.redis.moved, self.redis.rowed = self._moved, self._rowed
        self.store = MemoryStore(self._pause)
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.readers = [Reader(f"r{number}") for number in range(3)]
        self.log_lines: list[str] = []
        self.started_operations: list[tuple[str, tuple[Any, ...]]] = []
        self.release_by_number: dict[int, Release] = {}
        self.days = self.disasters = self.jumps = self.attempts = self.verdicts = 0
        self.whole_since = 0
        self.snapshot: tuple[dict[str, Any], set[str]] | None = None
        self.passed: set[str] = set()
        self.bad_generations: set[str] = set()
        self.retired: set[str] = set()
        self.lived: set[str] = set()
        self.reports: dict[str, VerifyReport] = {}
        self.superseded: dict[str, int] = {}
        self.decided: dict[str, int] = {}
        self.published: dict[tuple[str, str, int, int], int] = {}
        self.pins: dict[str, float | None] = {}
        self.left_at: dict[str, tuple[float, int]] = {}
        self.epoch_max = self.moves = 0

    # -- the world

    def releases(self) -> Releases:
        """Return the releases as a process of its own opens them."""
        control = Control(self.redis, KEYS)  # type: ignore[arg-type]
        releases = Releases(self.store, control)
        releases._release_by_number = self.release_by_number  # records never change, so parsing them once is enough
        return releases

    def run(self) -> None:
        """Run the whole life; raise Broken with all that happened."""
        try:
            with modelled():
                for _ in range(self.rng.randrange(4)):
                    generation = self.rng.choice(GENERATIONS)
                    self._start("night", (generation, self._attempt(), True), pauses=0.0)
                    self._start("publish", (generation, self._attempt()), pauses=0.0)
                for step in range(1, self.bias.steps + 1):
                    self.step = step
                    self._next()
                    self._check()
                self._end()
        except (AssertionError, LarderError) as error:
            log_text = "\n".join(self.log_lines)
            raise Broken(f"seed {self.seed}: {error}\n{log_text}") from error

    def _next(self) -> None:
        luck = self.rng.random()
        if self.actors and luck < 0.5:
            actor = self.rng.choice(self.actors)
            if self.rng.random() < self.bias.killed:
                self._log("kill", actor.name)
                self.actors.remove(actor)
                actor.running.throw(Killed)
                if self.rng.random() < self.bias.wiped_when_killed:
                    self._happen("wipe")
            else:
                self._resume(actor)
        elif luck < 0.62:
            self._read(self.rng.choice(self.readers))
        elif luck < 0.72:
            self._happen()
        elif len(self.actors) < 3:
            self._start_random_operation()

    def _log(self, *parts: Any) -> None:
        self.log_lines.append(f"{self.step} {' '.join(map(str, parts))}")

    def _attempt(self) -> str:
        self.attempts += 1
        return f"attempt-{self.attempts}"

    # -- operations

    def _start_random_operation(self) -> None:
        rng, generation = self.rng, self.rng.choice(GENERATIONS)
        candidates = sorted(self.passed) or [generation]
        arguments: tuple[Any, ...]
        if not self._is_whole() and rng.random() < 0.4:
            name, arguments = "restore", ("shell",)
        elif self.started_operations and rng.random() < self.bias.repeated:
            name, arguments = rng.choice(self.started_operations)
        else:
            name = rng.choices(list(self.operations), list(self.operations.values()))[0]
            target_generation = rng.choice(candidates) if rng.random() < 0.8 else generation
            if self.actors and rng.random() < 0.4:  # what another one is busy with
                target_generation = rng.choice(self.actors).about or target_generation
            attempt, good = self._attempt(), rng.random() < 0.75
            arguments = {
                "night": (generation, attempt, good), "begin": (generation,), "load": (target_generation,),
                "verify": (rng.choice(sorted(self.bad_generations) or [target_generation]), attempt, good),
                "publish": (target_generation, attempt),
                "roll_back": (target_generation if rng.random() < 0.3 else None, attempt),
                "override": (target_generation, attempt),
                "clear": (target_generation, attempt), "canary": (target_generation, float(rng.randint(1, 3)), attempt),
                "end_canary": (attempt, rng.random() < 0.5),
                "pin": (target_generation, rng.choice([None, self.now_s + 50, self.now_s + 5_000]), attempt),
                "unpin": (target_generation, attempt), "retire": (rng.randint(0, 2),),
                "refuse": (target_generation, attempt),
                "restore": (rng.choice(["shell", attempt]),),
            }[name]  # fmt: skip
            self.started_operations.append((name, arguments))
        is_move = name in ("publish", "roll_back", "canary", "end_canary", "restore", "retire")
        self._start(name, arguments, pauses=rng.choice([0.0, 0.1, 0.2, 0.4] if is_move else [0.0, 0.0, 0.2]))

    def _start(self, name: str, arguments: tuple[Any, ...], *, pauses: float) -> None:
        about = arguments[0] if arguments and arguments[0] in GENERATIONS else None
        actor = Actor(f"{name}{arguments}", pauses, self.disasters, self.step, self.days, about)

        def work() -> None:
            try:
                getattr(self, f"_do_{name}")(*arguments)
            except (LarderError, redis.exceptions.RedisError) as error:
                self._log("  no:", actor.name, "--", str(error)[:150])
            except Killed:
                pass
            else:
                self._log("  done:", actor.name)

        actor.running = greenlet.greenlet(work)
        self.actors.append(actor)
        self._log("start", actor.name)
        self._resume(actor)

    def _resume(self, actor: Actor) -> None:
        self.current = actor
        if self.rng.random() < self.bias.reply_lost:
            self.redis.loses_reply = True
        try:
            actor.running.switch()
        finally:
            self.current, self.redis.loses_reply = None, False
            if actor.running.dead and actor in self.actors:
                self.actors.remove(actor)

    def _pause(self, command: str, name: str) -> None:
        actor = self.current
        if command in ("unlink", "delete"):
            self._check_removal(command, name)
        if actor is not None and actor.pauses and self.rng.random() < actor.pauses:
            self._log("  pause:", actor.name, "before", command, name[:60].split("\n")[0])
            actor.running.parent.switch()
            self.current = actor
            if command in ("unlink", "delete"):
                self._check_removal(command, name)

    def _do_begin(self, generation: str) -> None:
        releases = self.releases()
        state = releases.state(generation)
        if state is GenerationState.LIVE:
            return
        demand_allowed("begin", generation, state)
        assert self.current is not None
        is_calm = self.current.age == self.disasters
        assert generation not in self.retired or not is_calm, "a retired generation was begun again"
        if state is None:
            releases.note(generation, GenerationState.BEGUN)
        path = generation_path(generation, "manifest.json")
        if self.store.read(path) is None:
            self.store.write(path, manifest_of(generation, 0))

    def _do_load(self, generation: str) -> None:
        releases = self.releases()
        read_manifest(self.store, generation)
        state = releases.state(generation)
        if state not in (GenerationState.LIVE, GenerationState.SUPERSEDED):
            demand_allowed("load", generation, state)
            if state is None:
                releases.note(generation, GenerationState.BEGUN)
        load_missing(releases.control, self.store, generation)
        if state in (None, GenerationState.BEGUN):
            sweep_module.note_loaded(releases, generation)

    def _do_verify(self, generation: str, attempt: str, good: bool) -> None:
        releases = self.releases()
        read_manifest(self.store, generation)
        state = releases.state(generation)
        if state in (GenerationState.LIVE, GenerationState.SUPERSEDED):
            return
        demand_allowed("verify", generation, state)
        live = releases.ledger().live_generation
        are_there = all(self.redis.strlen(name) for name in page_names(generation))
        demand_allowed("verify", generation, releases.state(generation))
        self.verdicts += 1
        path, number = generation_path(generation, "manifest.json"), self.verdicts
        if good and are_there:
            self.store.write(path, manifest_of(generation, number))
            self.reports[generation] = {"baseline": live}
            releases.mark_verified(generation, attempt=attempt)
        else:
            moves.refuse(releases, generation, reason="bad", attempt=attempt)
            self.store.write(path, manifest_of(generation, number, False))

    def _do_night(self, generation: str, attempt: str, good: bool) -> None:
        self._do_begin(generation)
        self._do_load(generation)
        self._do_verify(generation, attempt, good)

    def _do_publish(self, generation: str, attempt: str) -> None:
        releases, report = self.releases(), self.reports.get(generation, VerifyReport())
        if self.rng.random() < 0.5:  # the usual answer to "verified against another one"
            live = releases.ledger().live_generation
            if report.get("baseline") != live:
                self._do_verify(generation, attempt, True)
                report = self.reports.get(generation, VerifyReport())
        moves.publish(releases, generation, attempt=attempt, verified=report)

    def _do_clear(self, generation: str, attempt: str) -> None:
        self._do_verify(generation, attempt, True)
        report = self.reports.get(generation, VerifyReport())
        moves.publish(self.releases(), generation, attempt=attempt, verified=report)

    def _do_roll_back(self, to: str | None, attempt: str) -> None:
        moves.roll_back(self.releases(), target_generation=to, reason="bad", attempt=attempt)

    def _do_refuse(self, generation: str, attempt: str) -> None:
        moves.refuse(self.releases(), generation, reason="bad", attempt=attempt)

    def _do_override(self, generation: str, attempt: str) -> None:
        self.releases().override(generation, rule="any", reason="it is right", attempt=attempt)

    def _do_canary(self, generation: str, percent: float, attempt: str) -> None:
        report = self.reports.get(generation, VerifyReport())
        moves.start_canary(self.releases(), generation, percent, attempt, verified=report)

    def _do_end_canary(self, attempt: str, abandon: bool) -> None:
        moves.end_canary(self.releases(), attempt, "enough", abandon)

    def _do_pin(self, generation: str, expires_at: float | None, attempt: str) -> None:
        age = self.disasters
        self.releases().pin(generation, reason="audit", expires_at=expires_at, attempt=attempt)
        written = [
            record.action
            for record in all_releases_unwatched(self)
            if record.generation == generation and record.action in ("pin", "unpin")
        ]
        if age == self.disasters and written[-1] == "pin":  # nobody lifted it while this was under way
            self.pins[generation] = expires_at

    def _do_unpin(self, generation: str, attempt: str) -> None:
        try:
            self.releases().unpin(generation, attempt=attempt)
        finally:  # also a pin that came while this was under way: the later record counts
            self.pins.pop(generation, None)

    def _do_retire(self, keep: int) -> None:
        releases = self.releases()
        for generation in sweep_module.unneeded_generations(releases, kept_generations=keep, grace_s=GRACE_S):
            with contextlib.suppress(Conflict):
                sweep_module.retire(releases, generation, attempt="sweep", grace_s=GRACE_S)
        sweep_module.drop_old_rows(releases, overlay_ttl_s=OVERLAY_TTL_S)
        releases.control.forget_dead_replicas()

    def _do_restore(self, attempt: str) -> None:
        age = self.disasters
        restore_module.restore_redis(self.releases(), attempt=attempt, chunk_bytes=1, overlay_ttl_s=OVERLAY_TTL_S)
        if age == self.disasters and not any(actor.age < age for actor in self.actors):
            self.whole_since = age

    # -- what happens by itself

    def _happen(self, event: str = "") -> None:
        event = event or self.rng.choices(list(self.events), list(self.events.values()))[0]
        self._log("event", event)
        reader = self.rng.choice(self.readers)
        match event:
            case "later":
                self.now_s += self.rng.uniform(0, 2.5)
            case "much later":
                self.now_s += self.rng.uniform(4, 200)
            case "a day later":
                self.now_s += 90_000
                self.days += 1
                # Every step has a time-out far below a day: a process that sleeps through a whole day was killed.
                for actor in [actor for actor in self.actors if self.days - actor.days > 1]:
                    self._log("kill", actor.name)
                    self.actors.remove(actor)
                    actor.running.throw(Killed)
            case "clock back":
                self.now_s -= self.rng.uniform(1, 90_000)
                self.jumps += 1
            case "clock ahead":
                self.now_s += self.rng.uniform(1, 90_000)
            case "cut off":
                reader.is_cut_off = True
            case "reconnect":
                reader.is_cut_off = False
            case "restart":
                self._silence(reader)
                self.readers[self.readers.index(reader)] = Reader(reader.name, alive_since=self.step)
            case "wipe":
                self.redis.data.clear()
                self.disasters += 1
            case "save":
                self.snapshot = _copied(self.redis.data), set(self.passed)
            case "load" if self.snapshot is not None:
                self._load_snapshot(*self.snapshot)
        for beating_reader in self.readers:
            if not beating_reader.is_cut_off and beating_reader.payload is not None:
                self._beat(beating_reader)

    def _load_snapshot(self, data: dict[str, Any], passed: set[str]) -> None:
        self.redis.data = _copied(data)
        self.disasters += 1
        # States that only the registry had are those of the snapshot; what the release records say stays.
        ledger = fold_releases(all_releases_unwatched(self))
        for generation in passed - self.passed:
            if ledger.state(generation) in (
                None,
                GenerationState.VERIFIED,
                GenerationState.LIVE,
                GenerationState.SUPERSEDED,
            ):
                self.passed.add(generation)
                self.bad_generations.discard(generation)

    # -- readers

    def _read(self, reader: Reader) -> None:
        if reader.is_cut_off:
            return
        raw = self.redis.data.get(KEYS.live)
        pointer = None if raw is None else Pointer.from_bytes(raw)
        if reader.last_pointer is None:
            with self.unwatched():
                newest_record = newest_release(self.store)
            if newest_record is not None and (pointer is None or pointer.epoch < newest_record.epoch):
                pointer = pointer_of_release(newest_record)
        if pointer is not None and judge_pointer(pointer, reader.last_pointer) == "newer":
            assert reader.last_pointer is None or pointer.epoch > reader.last_pointer.epoch
            for generation in (pointer.generation, pointer.canary and pointer.canary.generation):
                assert generation not in self.retired, f"a reader was led to {generation}, which is retired"
            if self._is_whole():
                assert pointer.generation not in self.bad_generations, f"a reader was led to {pointer}"
            named_generations = (
                pointer.generation, pointer.previous, pointer.canary and pointer.canary.generation,
            )  # fmt: skip
            reader.last_pointer, reader.held_generations = (
                pointer,
                tuple(generation for generation in named_generations if generation),
            )
            self._log("read", reader.name, pointer.generation, pointer.epoch)
        self._beat(reader)

    def _beat(self, reader: Reader) -> None:
        members = self.redis.data.setdefault(KEYS.replicas, {})
        if members.get(reader.payload, -1.0) < self.now_s - REPLICA_DEAD_S:
            reader.alive_since = self.step
        self._silence(reader)
        serving = None if reader.last_pointer is None else reader.last_pointer.generation
        heartbeat = {"replica": reader.name, "serving": serving, "holds": list(reader.held_generations)}
        reader.payload = orjson.dumps(heartbeat)
        self.redis.zadd(KEYS.replicas, {reader.payload: self.now_s})

    def _silence(self, reader: Reader) -> None:
        if reader.payload is not None:
            self.redis.zrem(KEYS.replicas, reader.payload)

    # -- rules

    def _is_whole(self) -> bool:
        return self.whole_since == self.disasters

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        current, self.current = self.current, None
        try:
            yield
        finally:
            self.current = current

    def _moved(self, previous_raw: bytes | None, after: bytes) -> None:
        """Check a pointer that was just written."""
        to = Pointer.from_bytes(after)
        was = None if previous_raw is None else Pointer.from_bytes(previous_raw)
        written = (Release.from_bytes(raw, is_done=True) for raw in self._records())
        move_record = next((record for record in written if record.epoch == to.epoch), None)
        assert move_record is not None, f"no record says why the pointer moves to {to}"
        self.moves += 1
        self._log("  moved:", move_record.action, to)
        assert self.current is not None
        is_calm = self.current.age == self.disasters
        assert was is None or to.epoch > was.epoch, f"the epoch went from {was} to {to}"
        assert to.epoch > self.epoch_max or not is_calm, "the epoch is not the greatest ever"
        self.epoch_max = max(self.epoch_max, to.epoch)
        generation = to.generation
        assert generation not in self.retired, "a retired generation was made live"
        assert generation_path(generation, "manifest.json") in self.store.files, "no files"
        match move_record.action:
            case "publish":
                if generation not in self.passed:
                    # Redis lost the refusal, and its record was written too late for this publisher to see it.
                    is_late = not is_calm and not self._was_judged_bad(generation, intent=move_record)
                    assert is_late, "published without having passed verification"
                    self.passed.add(generation)
                    self.bad_generations.discard(generation)
                if was is not None and is_calm:
                    assert generation[:16] >= was.generation[:16], "older data over newer"
                    baseline = self.reports[generation]["baseline"]
                    assert baseline == was.generation, f"compared with {baseline} only"
                verified = sum(
                    record.action == "verify" and record.generation == generation
                    for record in all_releases_unwatched(self)
                )
                key = (generation, to.attempt, verified, self.disasters)
                assert key not in self.published, "one attempt published twice"
                self.published[key] = to.epoch
            case "roll_back":
                assert generation in self.passed, "rolled back to what never passed"
                assert generation not in self.bad_generations, "rolled back to a bad generation"
                superseded_at_move = self.superseded.get(generation, self.moves)  # a lost move left it already
                jumped = [
                    superseded_generation
                    for superseded_generation, move_number in self.superseded.items()
                    if move_number > superseded_at_move
                ]
                if was is not None and was.generation != generation:
                    jumped.append(was.generation)
                for jumped_generation in jumped:
                    self.superseded.pop(jumped_generation, None)
                    self.passed.discard(jumped_generation)
                    self.bad_generations.add(jumped_generation)
            case "restore":
                for recorded_generation, state in fold_releases(
                    all_releases_unwatched(self)
                ).state_by_generation.items():
                    if state in (GenerationState.ROLLED_BACK, GenerationState.REFUSED, GenerationState.ABANDONED):
                        self.passed.discard(recorded_generation)
                        self.bad_generations.add(recorded_generation)
                assert generation not in self.bad_generations, "restored a bad generation"
                assert generation in self.lived or not is_calm, "restored what never was live"
            case _:
                assert was is not None and generation == was.generation, "a canary made something live"
        if was is not None and generation != was.generation and move_record.action != "roll_back":
            self.superseded[was.generation] = self.moves
        self.superseded.pop(generation, None)
        self.lived.add(generation)
        if to.canary is not None:
            assert to.canary.generation in self.passed, "a canary that never passed"
        self._check_named(to)

    def _was_judged_bad(self, generation: str, *, intent: Release) -> bool:
        """Return whether a record before this intent judged the generation bad."""
        history = all_releases_unwatched(self)
        judged = fold_releases([record for record in history if record.number < intent.number]).state(generation)
        return judged in (
            GenerationState.REFUSED,
            GenerationState.ROLLED_BACK,
            GenerationState.ABANDONED,
            GenerationState.RETIRED,
        )

    def _check_named(self, pointer: Pointer) -> None:
        previous, canary = pointer.previous, pointer.canary
        if canary is not None:
            assert canary.generation not in self.bad_generations, "a bad generation is tried out"
        if previous is not None:
            assert previous not in self.bad_generations, "previous is a bad generation"
            assert previous not in self.retired, "previous is retired"
            assert previous != pointer.generation, "previous is the live one"
            assert canary is None or previous != canary.generation, "previous is the canary"

    def _rowed(self, generation: str, row: dict[str, Any]) -> None:
        """Check a registry row that was just written."""
        state, is_by_operation = GenerationState(row["state"]), row["reason"] != "restored"
        if is_by_operation and state is GenerationState.VERIFIED:
            self.passed.add(generation)
            self.bad_generations.discard(generation)
        elif is_by_operation and state in (GenerationState.REFUSED, GenerationState.ABANDONED):
            # An actor that looked before a Redis was lost may mark a generation that is live by now; the records say
            # that it is.
            if not self.disasters or fold_releases(all_releases_unwatched(self)).live_generation != generation:
                self.passed.discard(generation)
                self.bad_generations.add(generation)
        elif is_by_operation and state is GenerationState.RETIRED and self.current is not None:
            if fold_releases(all_releases_unwatched(self)).state(generation) is not GenerationState.RETIRED:
                self.decided[generation] = self.current.step
        elif is_by_operation and state in (GenerationState.SUPERSEDED, GenerationState.ROLLED_BACK):
            self.left_at[generation] = row["at"], self.disasters + self.jumps

    def _check_removal(self, command: str, name: str) -> None:
        actor = self.current
        parts = name.split("/" if command == "delete" else ":")
        at = 1 if command == "delete" else 4
        if actor is None or len(parts) <= at or (command == "delete" and len(parts) != 2):
            return
        generation = parts[at]
        if command == "unlink" and generation in self.retired:
            return  # nothing is left of it, whoever comes back and says that it held it
        if command == "delete":
            self.retired.add(generation)
        if actor.age != self.disasters:
            return
        raw = self.redis.data.get(KEYS.live)
        if raw is not None and self._is_whole():
            pointer = orjson.loads(raw)
            named = {pointer["generation"], pointer["previous"]}
            named |= {(pointer["canary"] or {}).get("generation")}
            assert generation not in named, f"{command} of {generation}, which the pointer names"
        members = self.redis.data.get(KEYS.replicas, {})
        # An actor that completes what another one decided and recorded before it was killed does not look at readers
        # again.
        decision_step = min(actor.step, self.decided.get(generation, actor.step))
        for reader in self.readers:
            is_alive = members.get(reader.payload, 0.0) >= self.now_s - REPLICA_DEAD_S
            if is_alive and reader.alive_since < decision_step and self._is_whole() and not self.jumps:
                assert generation not in reader.held_generations, (
                    f"{command} of {generation}, which {reader.name} holds"
                )
        if command == "delete" and actor.name.startswith("retire") and not self.jumps:
            expires_at = self.pins.get(generation, 0.0)
            assert expires_at is not None and self.now_s >= expires_at, f"{generation} is pinned"
        left_at, when = self.left_at.get(generation, (0.0, -1))
        if actor.name.startswith("retire") and when == self.disasters + self.jumps:
            assert self.now_s - left_at >= GRACE_S, f"{generation} was left just now"

    def _check(self) -> None:
        """Check the rules that hold after every step."""
        data = self.redis.data
        raw, rows = data.get(KEYS.live), data.get(KEYS.generations, {})
        if not self._is_whole():
            return
        states = {field.decode(): _state_of(row) for field, row in rows.items()}
        for key in data:
            if ":g:" in key:
                generation = key.split(":")[4]
                assert generation in states, f"{key} belongs to nobody"
        live = [generation for generation, state in states.items() if state == "live"]
        assert len(live) <= 1, f"{live} are live"
        if raw is not None:
            pointer = Pointer.from_bytes(raw)
            assert live == [pointer.generation], f"{live} are live, the pointer names {pointer}"
            assert pointer.epoch == self.epoch_max, "the pointer went back"
            assert pointer.generation not in self.bad_generations, "a bad generation is live"
            assert generation_path(pointer.generation, "manifest.json") in self.store.files
            for name in page_names(pointer.generation):
                assert name in data, f"{name} of the live generation is gone"
            self._check_named(pointer)

    def _end(self) -> None:
        """Check that Redis can be restored and the next night published, whatever happened."""
        for actor in self.actors:
            actor.running.throw(Killed)
        self.actors.clear()
        releases, self.step = self.releases(), self.step + 1
        self.current = Actor("end", 0.0, self.disasters, self.step, self.days)
        ledger = releases.ledger()
        if ledger.live_generation is not None:
            restore_module.restore_redis(releases, attempt="shell", chunk_bytes=1, overlay_ttl_s=OVERLAY_TTL_S)
            self.whole_since = self.disasters
        self._check()
        self._do_night(LAST, "the last night", True)
        moves.publish(releases, LAST, attempt="the last night", verified=self.reports[LAST])
        pointer = releases.control.read_pointer()
        assert pointer is not None and pointer.generation == LAST
        self._check()
        self._check_order()
        ledger = releases.ledger()
        assert (ledger.live_generation, ledger.live_epoch) == (LAST, pointer.epoch)
        assert set(states_of(ledger.state_by_generation, GenerationState.LIVE)) == {LAST}
        self.current = None
        for reader in self.readers:
            reader.is_cut_off = False
            self._read(reader)
            assert reader.last_pointer is not None and reader.last_pointer.generation == LAST

    def _check_order(self) -> None:
        """Check that no record was written before an earlier one, so that what a mover has read stays true."""
        written = [Release.from_bytes(raw, is_done=True) for raw in self._records()]
        assert [record.number for record in written] == list(range(1, len(written) + 1))
        epochs = [record.epoch for record in written]
        assert epochs == sorted(set(epochs)), f"records were written in the order {epochs}"

    def _records(self) -> list[bytes]:
        """Return the records in the order of writing."""
        is_record = re.compile(r"releases/[0-9]+\.json").fullmatch
        return [raw for name, raw in self.store.files.items() if is_record(name)]


@lru_cache(maxsize=4096)
def _state_of(row: bytes) -> str:
    return str(orjson.loads(row)["state"])


def _copied(data: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}


def states_of(states: Any, state: GenerationState) -> list[str]:
    """Generations in a state."""
    return [generation for generation, generation_state in states.items() if generation_state is state]


def all_releases_unwatched(life: Life) -> list[Release]:
    """Return the release records without a pause while they are read."""
    with life.unwatched():
        return all_releases(life.store, dict(life.release_by_number))
