"""Admission control under overload (CoDel), and sampling of the queues that it uses.

Three queues measure the load of the process: the event loop's (the duration of an iteration, since whatever becomes
ready during it has to wait for its end), the model's, and the requests under way below L1.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.process.background_loops import BackgroundLoops
from serving.admission.work_pacer import WorkPacer

ShedKind = Literal["live", "queue", "late", "full", "gone"]

SHED_KINDS: tuple[ShedKind, ...] = ("live", "queue", "late", "full", "gone")
"""Kinds of shed work. `live`: an inference. `queue`: a costly request, while shedding inferences is not enough. `late`:
a request whose deadline has passed before its answer. `full`: a request beyond `requests_max`. `gone`: a request whose
client has closed the connection."""

LIVE_LEFT_OUT_SHARE = 0.05
"""Admitted share of inferences up to which nearly all of them are shed: if the queue still stands, requests are shed
too."""

URGENT_TARGET_MULTIPLE = 5
"""Multiple of the loop's target: an iteration longer than this makes all valves shed at once."""

MODEL_WAIT_TARGET_SHARE = 1 / 3
"""Target of the model's queue: the fraction of an input's time for live inference that it may wait."""

_SHRINK_FACTOR_MIN, _FIRST_GROWTH_STEP = 0.1, 0.1
_ADMITTED_SHARE_MIN = 0.001
ObserveQueues = Callable[[float, float, float], None]


class Admission:
    """Admission state of one process, for its event loop only."""

    def __init__(self, *, target_s: float, interval_s: float, requests_max: int) -> None:
        self.loop_valve = Valve(target_s, interval_s)
        self.model_valve = Valve(MODEL_WAIT_TARGET_SHARE, interval_s)
        self.costly_valve = Valve(target_s, interval_s)
        self.requests_max = requests_max
        self.requests_under_way = 0
        self.work_pacer = WorkPacer()
        self.shed_counts: Counter[ShedKind] = Counter(dict.fromkeys(SHED_KINDS, 0))

    def enter(self) -> bool:
        """Return whether a request may go below L1, else count it as shed; `leave` ends an admitted request."""
        if self.requests_under_way >= self.requests_max:
            self.shed_counts["full"] += 1
            return False
        self.requests_under_way += 1
        return True

    def admit_costly(self) -> bool:
        """Return whether a request that costs far more than its refusal may continue, else count it as shed."""
        if self.costly_valve.admitted_share >= 1.0 or self.costly_valve.try_admit():
            return True
        self.shed_counts["queue"] += 1
        return False

    def leave(self) -> None:
        """End a request that `enter` admitted."""
        self.requests_under_way -= 1

    @property
    def is_loop_behind(self) -> bool:
        """True if requests queue for the event loop, so that some may miss their deadlines."""
        return self.loop_valve.interval_wait > self.loop_valve.target_wait

    def may_be_late(self, waited_s: float) -> bool:
        """True if a request's wait, or the loop's queue, is long enough that its deadline must be checked.

        Otherwise the check is skipped, since it may have to read the body.
        """
        return self.is_loop_behind or waited_s > self.loop_valve.target_wait

    def is_late(self, deadline_s: float, waited_s: float = 0.0) -> bool:
        """Return whether a request's deadline has passed before its work begins; if so, count it as shed.

        `waited_s` is the measured wait of the request; the wait in the loop's queue is used instead if it is longer.
        """
        if max(self.loop_valve.interval_wait, waited_s) < deadline_s:
            return False
        self.shed_counts["late"] += 1
        return True

    def admit_live(self) -> bool:
        """Return whether one more input may go to the model, else count it as shed."""
        if self.loop_valve.try_admit() and self.model_valve.try_admit():
            return True
        self.shed_counts["live"] += 1
        return False

    @property
    def live_admitted_share(self) -> float:
        """Share of the inputs, 0 to 1, that may go to the model."""
        return self.loop_valve.admitted_share * self.model_valve.admitted_share

    def observe(self, loop_iteration_s: float, model_wait_share: float, now_s: float) -> None:
        """Sample both queues: seconds of an iteration, and the share of its time that the oldest input has waited.

        A wait in the pacer counts like a wait for the loop.
        """
        loop_iteration_s = max(loop_iteration_s, self.work_pacer.longest_wait_s())
        self.loop_valve.observe(loop_iteration_s, now_s)
        costly_target_s = self.costly_valve.target_wait
        is_queue_standing = (
            self.loop_valve.admitted_share <= LIVE_LEFT_OUT_SHARE
            or loop_iteration_s > URGENT_TARGET_MULTIPLE * costly_target_s
        )
        self.costly_valve.observe(
            loop_iteration_s if is_queue_standing else min(loop_iteration_s, costly_target_s), now_s
        )
        self.model_valve.observe(model_wait_share, now_s)


class Valve:
    """Valve that admits a share, 0 to 1, of some work, depending on the wait in one queue.

    The signal is CoDel's (RFC 8289): the shortest wait of an interval. If it exceeds `target_wait`, every request had
    to wait, so the queue stands; a burst that drains within the interval does not count. The reaction is like DAGOR's
    (WeChat, SoCC 2018): a share of the work is admitted. After an interval with a standing queue the share is
    multiplied by the ratio of `target_wait` to the wait (the gradient of Netflix' concurrency-limits). After any other
    interval it grows by a step, which doubles until a queue stands again (TCP's slow start): the share recovers within
    half a second after an overload.
    """

    def __init__(self, target_wait: float, interval_s: float) -> None:
        self.target_wait = target_wait
        self.admitted_share = 1.0
        self.interval_wait = 0.0
        """Shortest wait of the previous interval, in the unit of `target_wait`."""
        self._interval_s = interval_s
        self._shortest_wait, self._interval_began_at = inf, 0.0
        self._growth_step, self._admission_credit = _FIRST_GROWTH_STEP, 0.0

    def observe(self, queue_wait: float, now_s: float) -> None:
        """Add one sample of the wait, in the unit of `target_wait`; `now_s` in seconds.

        An interval has at least two samples, since one long pause is not a queue. The last sample of an interval is
        also the first of the next one, so that every sample counts even if samples are rare.
        """
        if self._shortest_wait == inf:
            self._interval_began_at = now_s
        self._shortest_wait = min(self._shortest_wait, queue_wait)
        if now_s - self._interval_began_at < self._interval_s:
            return
        self.interval_wait = self._shortest_wait
        if self.interval_wait <= self.target_wait:
            self.admitted_share = min(1.0, self.admitted_share + self._growth_step)
            self._growth_step = min(1.0, 2 * self._growth_step)
        else:
            self._growth_step = _FIRST_GROWTH_STEP
            self.admitted_share *= max(_SHRINK_FACTOR_MIN, self.target_wait / self.interval_wait)
            if self.admitted_share < _ADMITTED_SHARE_MIN:
                self.admitted_share = 0.0
        self._shortest_wait, self._interval_began_at = queue_wait, now_s

    def try_admit(self) -> bool:
        """Return whether one more piece of work is admitted: exactly the admitted share is, evenly spread."""
        if self.admitted_share >= 1.0:
            return True
        self._admission_credit += self.admitted_share
        if self._admission_credit < 1.0:
            return False
        self._admission_credit -= 1.0
        return True


@dataclass(slots=True, eq=False)
class LoopLagSampler:
    """Periodic sampler: calls `observe_queues` with the length of an iteration, the model's wait share and the time.

    The length is measured from one callback to the next, which the first one schedules. Everything that became ready in
    between is handled in that time, so the length is the longest wait of a new request. Between samples nothing runs.
    After an iteration longer than the sampling interval the next iteration is sampled as well: otherwise overload would
    make samples rarer.
    """

    observe_queues: ObserveQueues
    get_model_wait_share: Callable[[], float]
    _: KW_ONLY
    sampling_interval_s: float
    monotonic_clock: Callable[[], float] = time.monotonic
    loops: BackgroundLoops = field(default_factory=BackgroundLoops)
    _sampling_task: asyncio.Task[None] | None = field(init=False, default=None)

    def start(self) -> None:
        """Start sampling, on the running event loop."""
        self._sampling_task = self.loops.start("loop_lag", self._sample_iterations)

    def stop(self) -> None:
        """Stop sampling."""
        if self._sampling_task is not None:
            self._sampling_task.cancel()
            self._sampling_task = None

    async def _sample_iterations(self) -> None:
        """Observe one iteration after a pause, and the following ones until one is short."""
        await asyncio.sleep(self.sampling_interval_s)
        # This runs ahead of the callbacks of ready sockets, so the measured iteration begins here.
        loop, iteration_began_at = asyncio.get_running_loop(), self.monotonic_clock()
        done_future: asyncio.Future[None] = loop.create_future()

        def end_iteration() -> None:
            nonlocal iteration_began_at
            if done_future.done():  # the task was cancelled meanwhile
                return
            now_s = self.monotonic_clock()
            iteration_s, iteration_began_at = now_s - iteration_began_at, now_s
            try:
                self.observe_queues(iteration_s, self.get_model_wait_share(), now_s)
            except Exception as error:
                done_future.set_exception(error)
                return
            if iteration_s > self.sampling_interval_s:
                loop.call_soon(end_iteration)
            else:
                done_future.set_result(None)

        loop.call_soon(end_iteration)
        await done_future


class OverloadCollector(Collector):
    """Collector of the load of the process, and of its measures against overload."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterable[Metric]:
        """Yield the counter family of shed work, and gauges of the state that decides it."""
        admission = self._admission
        shed_family = CounterMetricFamily(
            "larder_shed", "Inferences and whole requests that were shed under overload", labels=["stage"]
        )
        for shed_kind, shed_count in admission.shed_counts.items():
            shed_family.add_metric([shed_kind], shed_count)
        yield shed_family
        for gauge_name, gauge_help, gauge_value in (
            (
                "queue_seconds",
                "Shortest iteration of the event loop in the last interval",
                admission.loop_valve.interval_wait,
            ),
            ("live_admitted_ratio", "Share of the inputs that may go to the model", admission.live_admitted_share),
            (
                "costly_admitted_ratio",
                "Share of the costly requests that are admitted",
                admission.costly_valve.admitted_share,
            ),
            ("requests_under_way", "Requests below L1", admission.requests_under_way),
            ("requests_max", "Requests that may be below L1 at once", admission.requests_max),
        ):
            yield GaugeMetricFamily(f"larder_{gauge_name}", gauge_help, gauge_value)
