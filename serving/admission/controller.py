"""Admission control under overload: live inference is left out first, requests are refused last.

Three queues say how the process is doing: the event loop's (how long a turn takes: what is ready now is handled after
it), the model's, and the requests under way below L1.
"""

from collections import Counter
from typing import Literal

from serving.admission.codel import Valve
from serving.admission.work_pacer import WorkPacer

Stage = Literal["live", "queue", "late", "full", "gone"]
STAGES: tuple[Stage, ...] = ("live", "queue", "late", "full", "gone")
"""Kinds of shed work: an inference; a request that would cost much while leaving live out is not enough; one whose
deadline is over before its answer; one beyond `requests_max`; one whose client has closed the connection.
"""

LEFT_OUT = 0.05
"""The share of live at which leaving it out has been tried: what stands even then is more than all can be given."""

URGENT = 5
"""Multiple of the loop's target: a turn that long leaves no time for trying."""

MODEL_TARGET = 1 / 3
"""Part, 0 to 1, of an input's time for live inference that it may spend in a standing queue of the model."""


class Admission:
    """Admission state of one process, for its event loop only."""

    def __init__(self, *, target_s: float, interval_s: float, requests_max: int) -> None:
        self.loop = Valve(target_s, interval_s)
        self.model = Valve(MODEL_TARGET, interval_s)
        self.costly = Valve(target_s, interval_s)
        self.requests_max = requests_max
        self.under_way = 0
        self.work = WorkPacer()
        self.shed: Counter[Stage] = Counter(dict.fromkeys(STAGES, 0))

    def enter(self) -> bool:
        """Returns whether a request may go below L1, else counts it as shed; one that may ends with `leave`."""
        if self.under_way >= self.requests_max:
            self.shed["full"] += 1
            return False
        self.under_way += 1
        return True

    def admit_costly(self) -> bool:
        """Returns whether a request costing many times what its refusal does may go on; else it is counted as shed."""
        if self.costly.admitted_share >= 1.0 or self.costly.admit():
            return True
        self.shed["queue"] += 1
        return False

    def leave(self) -> None:
        """Gives back the place of a request that entered and now has its response."""
        self.under_way -= 1

    @property
    def is_behind(self) -> bool:
        """True if requests stand before the loop, so that some may be too late."""
        return self.loop.wait > self.loop.target

    def may_be_late(self, waited_s: float) -> bool:
        """True if a request waited so long, or stands before such a queue, that its deadline is to be looked at."""
        return self.is_behind or waited_s > self.loop.target

    def is_late(self, deadline_s: float, waited_s: float = 0.0) -> bool:
        """Returns whether a request with so much time has spent it all before its turn; then it is counted as shed.

        `waited_s` is what it has spent for certain; the loop's standing queue may be longer.
        """
        if max(self.loop.wait, waited_s) < deadline_s:
            return False
        self.shed["late"] += 1
        return True

    def admit_live(self) -> bool:
        """Returns whether one more input may go to the model; else it is counted as shed."""
        if self.loop.admit() and self.model.admit():
            return True
        self.shed["live"] += 1
        return False

    @property
    def live_share(self) -> float:
        """Share of the inputs, 0 to 1, that may go to the model."""
        return self.loop.admitted_share * self.model.admitted_share

    def observe(self, turn_s: float, model_wait: float, now_s: float) -> None:
        """Samples both queues: seconds of a turn, and the part of its time that the model's oldest input has waited.

        What waits for its turn in the pacer waits for the loop, too.
        """
        turn_s = max(turn_s, self.work.waited_s())
        self.loop.observe(turn_s, now_s)
        target = self.costly.target
        is_queue_standing = self.loop.admitted_share <= LEFT_OUT or turn_s > URGENT * target
        self.costly.observe(turn_s if is_queue_standing else min(turn_s, target), now_s)
        self.model.observe(model_wait, now_s)
