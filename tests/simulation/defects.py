"""Defects planted in the serving side, each of which a simulation must find: races, leaks, broken rules."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args
from weakref import WeakKeyDictionary

import pytest

from cache.l2.data_plane import Breaker
from cache.l2.pool import PipelineConnection
from cache.store.blocklist import Blocklist
from cache.tiers import reads, tiered
from cache.tiers.l1 import LocalKey, LocalTier
from cache.tiers.singleflight import SingleFlight
from cache.tiers.tiered import WriteBehind
from serving.admission.controller import Admission
from serving.engine.answer_observer import RecentNames
from serving.engine.inference import FlightKey, LiveInferences
from serving.engine.leases import LeaseManager
from serving.engine.micro_batcher import MicroBatcher
from serving.generations import blocklist_source, pointer_follower
from serving.generations.holder import GenerationHolder
from serving.generations.pointer_follower import Concerns, DegradedReopen, PointerFollower
from serving.generations.refresher import Refresher
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.traffic.arms import Arm, ArmHolder, ArmState, Routing
from serving.traffic.router import ExperimentRouter
from serving.usage.hot_keys import HotKeySketch
from tests.simulation.scenarios import EXPERIMENTS, Bias
from tests.simulation.virtual_loop import HOST

Plant = Callable[[pytest.MonkeyPatch], None]


def _l1_forgets_the_generation(patch: pytest.MonkeyPatch) -> None:
    def key(_generation: str, table: str, key: int | bytes) -> LocalKey:
        return LocalKey("", table, key)

    patch.setattr(tiered, "LocalKey", key)


def _an_older_epoch_is_followed(patch: pytest.MonkeyPatch) -> None:
    real = pointer_follower.judge_pointer

    def judge(pointer: Any, seen_pointer: Any) -> Any:
        verdict = real(pointer, seen_pointer)
        return "newer" if verdict == "backwards" else verdict

    patch.setattr(pointer_follower, "judge_pointer", judge)


def _ready_answers_outlive_their_snapshot(patch: pytest.MonkeyPatch) -> None:
    real = Snapshot.__post_init__ if hasattr(Snapshot, "__post_init__") else None
    assert real is None
    with_blocklist, released_as = Snapshot.with_blocklist, Snapshot.released_as

    def keeping(make: Callable[..., Snapshot]) -> Callable[..., Snapshot]:
        def make_with_same_stamp(self: Snapshot, *arguments: Any) -> Snapshot:
            snapshot = make(self, *arguments)
            object.__setattr__(snapshot, "stamp", self.stamp)
            return snapshot

        return make_with_same_stamp

    patch.setattr(Snapshot, "with_blocklist", keeping(with_blocklist))
    patch.setattr(Snapshot, "released_as", keeping(released_as))


def _inputs_of_an_overlay_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    real = reads.judge_entry

    def judge(entry: Any, record_key: Any, tier: Any) -> Any:
        return real(entry, record_key._replace(input_digest=None), tier)

    for owner in (reads, tiered):
        patch.setattr(owner, "judge_entry", judge)


def _flights_forget_the_input(patch: pytest.MonkeyPatch) -> None:
    real = SingleFlight.board

    def board(self: Any, key: Any, work: Any) -> Any:
        is_inference = type(key) is tuple and len(key) == len(get_args(FlightKey))
        return real(self, (*key[:3], b"", *key[4:]) if is_inference else key, work)

    patch.setattr(SingleFlight, "board", board)


def _who_leaves_takes_the_flight_along(patch: pytest.MonkeyPatch) -> None:
    real = SingleFlight._leave

    def leave(self: Any, flight: Any, waiter: Any) -> None:
        if not waiter.done() or waiter.cancelled():
            flight.work.cancel()
        real(self, flight, waiter)

    patch.setattr(SingleFlight, "_leave", leave)


def _a_failed_batch_keeps_its_worker(patch: pytest.MonkeyPatch) -> None:
    real = MicroBatcher._finish_batch

    def finish(self: Any, batch: Any, started: float, outcomes: Any, *remaining_arguments: Any) -> None:
        real(self, batch, started, outcomes, *remaining_arguments)
        if outcomes and all(isinstance(outcome, Exception) for outcome in outcomes):
            self._idle_worker_count -= 1

    patch.setattr(MicroBatcher, "_finish_batch", finish)


def _an_older_blocklist_is_taken(patch: pytest.MonkeyPatch) -> None:
    def read_middle_blocklist(store: Any, _versions: Any, current: int) -> tuple[Blocklist | None, None]:
        names = store.names("blocklist")
        if not names or len(names) == current:
            return (Blocklist() if current < 0 else None), None
        raw = store.read(f"blocklist/{names[len(names) // 2]}")
        return Blocklist.from_bytes(raw), None

    patch.setattr(blocklist_source, "newest_blocklist", read_middle_blocklist)


def _a_blocklist_misses_what_is_loading(patch: pytest.MonkeyPatch) -> None:
    def put(self: GenerationHolder, served: ServedGenerations) -> None:
        canary = self.canary
        if canary is not None and served.next and served.next.generation == canary.generation:
            real(self, served)
            return
        self.served = dataclasses.replace(served, canary=None)
        self._metrics.set_generations(self.served.generation_by_role, is_degraded=False)

    real = GenerationHolder.replace_served
    patch.setattr(GenerationHolder, "replace_served", put)


def _everybody_leads(patch: pytest.MonkeyPatch) -> None:
    async def acquire_always(self: LeaseManager, lease_mark: Any) -> None:
        return None

    patch.setattr(LeaseManager, "_try_acquire", acquire_always)


def _a_lease_is_waited_for_without_end(patch: pytest.MonkeyPatch) -> None:
    real = LeaseManager._follow

    async def follow(self: Any, lease_mark: Any, lease_state: Any, view: Any, record_key: Any, give_up: float) -> Any:
        return await real(self, lease_mark, lease_state, view, record_key, give_up + 3_600.0)

    async def keep(self: Any, lease_mark: Any, lease_set_at: float, compute: Any) -> Any:
        self._note_lease_begin(lease_mark, lease_set_at)
        return await compute(lease_mark)  # never given back, renewed for ever

    patch.setattr(LeaseManager, "_follow", follow)
    patch.setattr(LeaseManager, "_lead", keep)


def _a_slow_load_holds_up_the_next_look(patch: pytest.MonkeyPatch) -> None:
    async def mended(self: PointerFollower) -> None:
        async with self._poll_lock:
            await self._poll_pointer()
            self._stage_wanted()
            self._degraded_reopen.reopen_if_due(self.progress.followed_pointer)
            await self._degraded_reopen.wait_until_settled()
            await self.staged.wait_until_settled()
            if self._previous_load_task is not None:
                await asyncio.wait({self._previous_load_task})

    patch.setattr(PointerFollower, "poll_pointer", mended)


def _recent_names_are_read_by_a_thread(patch: pytest.MonkeyPatch) -> None:
    async def report(self: HotKeySketch) -> None:
        if self.get_live_snapshot() is not None:
            await asyncio.to_thread(_count_names, self.recent)

    patch.setattr(HotKeySketch, "report", report)


def _count_names(recent: RecentNames) -> int:
    name_count = 0
    for name in recent:
        is_one = name is not None
        name_count += is_one
    return name_count


def _live_has_no_time_limit(patch: pytest.MonkeyPatch) -> None:
    real = LiveInferences.run

    async def run(self: Any, snapshot: Any, cases: Any, limit_s: float) -> Any:
        return await real(self, snapshot, cases, limit_s + 60.0)

    patch.setattr(LiveInferences, "run", run)


def _of_many_at_once_some_keep_their_place(patch: pytest.MonkeyPatch) -> None:
    real = Admission.enter

    def enter(self: Admission) -> bool:
        is_admitted = real(self)
        if is_admitted and self.requests_under_way == 6:
            self.requests_under_way += 1
        return is_admitted

    patch.setattr(Admission, "enter", enter)


def _some_answers_are_counted_twice(patch: pytest.MonkeyPatch) -> None:
    real = Metrics.answered

    def answered(self: Metrics, table: str, source: Any, seconds: float) -> None:
        real(self, table, source, seconds)
        if source == "previous":
            real(self, table, source, seconds)

    patch.setattr(Metrics, "answered", answered)


def _a_canary_answers_some_entities_of_a_request(patch: pytest.MonkeyPatch) -> None:
    from serving.engine.ladder import Ladder

    real = Ladder.resolve

    async def resolve(self: Any, served: Any, cases: Any, context: Any) -> Any:
        if served.canary is None or len(cases) < 2:
            return await real(self, served, cases, context)
        half = len(cases) // 2
        first = await real(self, served, cases[:half], context)
        return first + await real(self, served.tried(served.next), cases[half:], context)

    patch.setattr(Ladder, "resolve", resolve)


def _a_live_answer_never_ends(patch: pytest.MonkeyPatch) -> None:
    real = LocalTier.put

    def put(self: LocalTier, key: Any, entry: Any) -> None:
        is_live = getattr(entry, "expires_at", None) is not None
        real(self, key, entry._replace(expires_at=entry.expires_at + 3_600.0) if is_live else entry)

    patch.setattr(LocalTier, "put", put)


def _the_breaker_never_closes(patch: pytest.MonkeyPatch) -> None:
    real = Breaker.note_success

    def success(self: Breaker) -> None:
        if self.state == "closed":
            real(self)

    patch.setattr(Breaker, "note_success", success)


def _a_late_reply_is_taken_for_the_next(patch: pytest.MonkeyPatch) -> None:
    def abort(self: PipelineConnection, error: Any) -> None:
        if self._pipelines:
            self._pipelines.popleft().land(error)

    patch.setattr(PipelineConnection, "abort", abort)


def _only_announcements_are_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Refresher, "pointer_poll_s", lambda _self: 3_600.0)


def _what_is_degraded_stays_so(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DegradedReopen, "reopen_if_due", lambda _self, _pointer: None)


def _what_is_staged_is_served(patch: pytest.MonkeyPatch) -> None:
    real = GenerationHolder.hold_staged

    def hold_and_serve(self: GenerationHolder, coming: Snapshot | None) -> None:
        real(self, coming)
        if coming is not None and self.served is not None and self.canary is None:
            self.served = dataclasses.replace(self.served, live=coming)

    patch.setattr(GenerationHolder, "hold_staged", hold_and_serve)


def _previous_is_whatever_arrives_last(patch: pytest.MonkeyPatch) -> None:
    async def fetch(self: PointerFollower, _pointer: Any, generation: str) -> None:
        previous = await self.holder.open_superseded(self._store, generation)
        if previous is not None and self.served is not None:
            self.holder.replace_served(dataclasses.replace(self.served, previous=previous))

    real = PointerFollower._follow

    async def follow(self: PointerFollower, pointer: Any, *, is_from_redis: bool = True) -> None:
        self._previous_load_task = None  # goes on, whatever is published meanwhile
        await real(self, pointer, is_from_redis=is_from_redis)

    patch.setattr(PointerFollower, "_load_previous", fetch)
    patch.setattr(PointerFollower, "_follow", follow)


def _nobody_says_that_redis_is_gone(patch: pytest.MonkeyPatch) -> None:
    real = Concerns.note

    def note(self: Concerns, about: Any, reason: str | None) -> bool:
        return False if reason == "redis_unreachable" else real(self, about, reason)

    patch.setattr(Concerns, "note", note)


def _a_full_queue_of_overlays_is_never_emptied(patch: pytest.MonkeyPatch) -> None:
    real = WriteBehind._write_some

    async def write_some(self: Any) -> None:
        if self.failed:
            await asyncio.Event().wait()  # what waits behind a failure waits for ever
        await real(self)

    patch.setattr(WriteBehind, "_write_some", write_some)


def _a_pin_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServedGenerations, "pin_generation", lambda self, _generation: self)


def _a_page_of_another_night_is_read(patch: pytest.MonkeyPatch) -> None:
    def confused(real: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        # Views by process: in one that they shared, a simulation would depend on those before it.
        view_by_host: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

        def read_previous_view(view: Any, record_keys: Any) -> Any:
            host = HOST.get()
            previous_view = view_by_host.get(host, view)
            view_by_host[host] = view
            return real(previous_view, record_keys)

        return read_previous_view

    for name in ("reads_of", "page_reads"):
        patch.setattr(tiered, name, confused(getattr(tiered, name)))


def _an_arm_misses_what_is_blocked_while_it_starts(patch: pytest.MonkeyPatch) -> None:
    real = ArmHolder._enforce

    async def enforce(self: ArmHolder) -> None:
        blocklist = self.own_service.follower.holder.blocklist
        if blocklist is not getattr(self, "passed_on", None):  # told once, and never compared
            self.passed_on = blocklist  # type: ignore[attr-defined]
            for arm in list(self._arm_by_namespace.values()):
                if arm.state is ArmState.SERVING:
                    await real(self, arm)

    async def enforce_one(self: ArmHolder, arm: Arm) -> None:
        assert arm.namespace is not None
        if arm.namespace.service.follower.served is None:  # not once it has loaded
            await real(self, arm)

    patch.setattr(ArmHolder, "enforce", enforce)
    patch.setattr(ArmHolder, "_enforce", enforce_one)


def _requests_under_way_fail_when_their_experiment_stops(patch: pytest.MonkeyPatch) -> None:
    def note(self: ExperimentRouter, assigned: Any, key: bytes) -> None:
        routing, (experiment, arm, *_) = self._arm_holder.routing, assigned
        is_logged = routing is not None and routing.is_sampled(experiment, key)
        self.exposures.count_request(experiment, arm, key if is_logged else None)

    patch.setattr(ExperimentRouter, "_log_exposure", note)


def _an_arm_is_known_only_once_it_has_started(patch: pytest.MonkeyPatch) -> None:
    real = ArmHolder._advance_arms

    def advance_arms(self: ArmHolder) -> None:
        starting = [arm.name for arm in self._arm_by_namespace.values() if arm.state is ArmState.STARTING]
        for name in starting:
            del self._arm_by_namespace[name]
        real(self)

    patch.setattr(ArmHolder, "_advance_arms", advance_arms)


def _a_blocklist_is_put_in_force_at_the_first_try_or_never(patch: pytest.MonkeyPatch) -> None:
    real = GenerationHolder.enforce

    async def enforce(self: GenerationHolder) -> bool:
        if self.blocklist is not getattr(self, "tried", None):
            self.tried = self.blocklist  # type: ignore[attr-defined]
            await real(self)
            self.enforcement_error = None
        return True

    patch.setattr(GenerationHolder, "enforce", enforce)


def _looks_at_experiments_wait_until_arms_have_started(patch: pytest.MonkeyPatch) -> None:
    real = ArmHolder.refresh

    async def refresh_and_settle(self: ArmHolder) -> None:
        await real(self)
        async with self._refresh_lock:
            await self.settled()

    patch.setattr(ArmHolder, "refresh", refresh_and_settle)


def _an_arm_that_cannot_obey_answers(patch: pytest.MonkeyPatch) -> None:
    def answering(self: Arm) -> Any:
        is_held = self.state in (ArmState.SERVING, ArmState.DRAINING)
        service = None if self.namespace is None else self.namespace.service
        return service if is_held and service and service.follower.served else None

    patch.setattr(Arm, "answering_service", property(answering))


def _keys_are_drawn_anew_for_each_version_of_the_experiments(patch: pytest.MonkeyPatch) -> None:
    real = Routing.__init__

    def init(self: Routing, record: Any) -> None:
        real(self, record)
        self._experiment_owners = dataclasses.replace(record, salt=f"{record.salt}{record.version}").owners

    patch.setattr(Routing, "__init__", init)


DEFECTS: dict[str, Plant] = {
    name.removeprefix("_").replace("_", " "): plant
    for name, plant in list(globals().items())
    if name.startswith("_") and getattr(plant, "__module__", "") == __name__ and name != "_count_names"
}
"""What was planted -> how."""

_CALM = dict.fromkeys(
    ("redis down", "redis wiped", "redis older", "redis held", "redis slow", "link held", "cut", "stall"), 0
)  # fmt: skip
_ARMS = _CALM | EXPERIMENTS
BIASES: dict[str, Bias] = {
    "a slow load holds up the next look": Bias(
        _CALM | {"night": 20, "roll_back": 15, "store hung": 15, "ask": 20, "kill": 0, "canary": 10}
    ),
    "recent names are read by a thread": Bias(_CALM | {"ask": 60, "burst": 60, "night": 1}, steps=90),
    "what is degraded stays so": Bias(_CALM | {"model broken": 20, "night": 20, "ask": 20}),
    "an arm misses what is blocked while it starts": Bias(
        _ARMS | {"block": 40, "store hung": 0, "kill": 10, "arm hung": 20}
    ),
    "requests under way fail when their experiment stops": Bias(
        _ARMS | {"burst": 80, "stop experiment": 30, "redis slow": 30}
    ),
    "an arm is known only once it has started": Bias(_ARMS | {"arm hung": 20}),
    "a blocklist is put in force at the first try or never": Bias(_ARMS | {"block": 40, "no threads": 30}),
    "looks at experiments wait until arms have started": Bias(
        _ARMS | {"arm hung": 30, "stop experiment": 20, "restart": 20, "kill": 0}
    ),
    "an arm that cannot obey answers": Bias(_ARMS | {"block": 40, "no threads": 40}),
    "keys are drawn anew for each version of the experiments": Bias(_ARMS),
    "previous is whatever arrives last": Bias(
        _CALM | {"night": 25, "roll_back": 15, "kill": 15, "restart": 10, "ask": 10}
    ),
}
"""What was planted -> simulations in which it shows often."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Within the block, the service has this defect."""
    with pytest.MonkeyPatch.context() as patch:
        DEFECTS[name](patch)
        yield
