"""The rules that hold at every step of a simulation, whatever went wrong."""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cache.format.ids import fingerprint
from cache.store.blocklist import Blocklist
from cache.store.releases import Pointer
from serving.answers.sources import STORED
from serving.http.service import Service
from tests.simulation import nights
from tests.simulation.callers import Asked, Call, Question, Reply, Wrong, judge
from tests.simulation.leftovers import Broken, demand_nothing_left, demand_sums
from tests.simulation.replicas import Replica
from tests.simulation.virtual_loop import Host

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SLACK_S = 0.06
"""Seconds beyond its deadline that an answer may take, on wires and in threads."""

LEARNS_S = 8.0
"""Calm seconds within which a replica knows what has been written down."""

MENDS_S = 50.0
"""Calm seconds within which a model that opens again is used again."""

STALE_S = 8.0
"""Seconds without Redis after which every answer says so."""

FORGOTTEN_S = 30.0
"""Life of a live answer in these simulations, in seconds."""

DEADLINE_MS = 300.0
"""Milliseconds that a service gives every call, unless it asks for less."""

CALM_S = 3.0
"""Calm seconds after which processes can talk: a slow model outlasts the wait for whoever computes, then both do."""


class Rules:
    """Rules of one simulation."""

    def __init__(self, simulation: "Simulation") -> None:
        self._of = simulation
        self._epochs: dict[int, str] = {}
        """Every pointer that was ever in place: epoch -> generation."""
        self._tried: set[str] = set()
        self._moved_at = 0.0
        self._blocklists: list[tuple[float, Blocklist]] = []
        self._seen: dict[Host, tuple[int, int]] = {}
        """Process -> greatest epoch and version of the blocklist that it had."""
        self._holds: dict[tuple[Host, str], float] = {}
        """Process and generation -> since when it was seen to be held."""
        self._probed: dict[Host, float] = {}
        """Process -> its first call in this calm that L1 did not answer."""
        self._probing_at = float("-inf")
        self._waiting: defaultdict[int, dict[int, float]] = defaultdict(dict)
        """Fingerprint of an entity -> when each call with it stops waiting for another process."""

    # -- told of

    def moved(self, raw: bytes) -> None:
        """A pointer that is now in place."""
        pointer = Pointer.from_bytes(raw)
        self._epochs[pointer.epoch] = pointer.generation
        self._moved_at = self._of.loop.time()
        if pointer.canary is not None:
            self._tried.add(pointer.canary.generation)

    def blocked(self, blocklist: Blocklist) -> None:
        """A version of the blocklist that is now in the store."""
        self._blocklists.append((self._of.loop.time(), blocklist))

    def removing(self, name: str) -> None:
        """A key that is about to go: not one of what a replica holds and has had the time to say so."""
        generation = name.split(":")[4] if ":g:" in name else ""
        for replica in self._of.replicas:
            if replica.service is None or self._up_s(replica.host) < LEARNS_S:
                continue
            away = ("redis", f"link held {replica.number}", f"cut {replica.number}", "stall")
            holds_s = self._of.loop.time() - self._held_since(replica, generation)
            if generation in replica.service.follower.shelf.generations and (
                min(holds_s, self._of.faults.calm_s(*away)) > LEARNS_S
            ):
                raise Broken(f"{name} goes, {replica.host.name} holds it")

    def _held_since(self, replica: Replica, generation: str) -> float:
        return self._holds.setdefault((replica.host, generation), self._of.loop.time())

    def can_talk(self, fingerprint: int) -> bool:
        """True if processes have been able to tell each other what they compute: after calm, and none left Redis alone.

        After an outage the first call finds out that it is over; those beside it have no lease. Who has waited long
        enough for another process' answer computes it as well.
        """
        now = self._of.loop.time()
        has_waited = any(now >= alone_at for alone_at in self._waiting[fingerprint].values())
        return self._of.faults.calm_s() > CALM_S < now - self._probing_at and not has_waited

    # -- calls

    def asked(self, call: Call, replica: Replica) -> Asked:
        """What is known as a call begins."""
        service = replica.service
        held = None if service is None else service.follower.holding
        if service is not None and service.tiers._remote.stats.breaker != "closed":
            self._probing_at = self._of.loop.time()
        for each in call.questions:
            # A process waits for another one for half of what a live answer may take, which is 3/4 of the call's time.
            caller_s = min(call.deadline_ms, DEADLINE_MS) / 1000
            alone_at = self._of.loop.time() + min(0.2, caller_s * 0.75 / 2)
            self._waiting[fingerprint(each.id.encode())].setdefault(id(call), alone_at)
        return Asked(
            call, self._of.loop.time(), replica.host, service,
            None if held is None else held.live.epoch,
            None if held is None else held.live.generation,
            Blocklist() if held is None else held.live.blocklist,
            self._of.loop.stalled_s,
            self._away_s(replica),
            frozenset() if held is None
            else frozenset(each for each in held.generations if self._of.is_loaded(each)),
        )  # fmt: skip

    def _away_s(self, replica: Replica) -> float:
        """Seconds for which a replica has not been able to reach Redis."""
        return self._of.faults.lasting_s("redis down", "redis held", f"link held {replica.number}")

    def ended(self, call: Call) -> None:
        """A call that was answered, or whose caller left."""
        for each in call.questions:
            self._waiting[fingerprint(each.id.encode())].pop(id(call), None)

    def answered(self, asked: Asked, reply: Reply) -> list[Any]:
        """Judges a reply; what to write down of it."""
        call, now = asked.call, self._of.loop.time()
        replica = self._of.replicas[call.replica]
        if asked.service is not None and replica.host is asked.host and replica.is_up:
            stalled_s = self._of.loop.stalled_s - asked.stalled_s
            late_s = now - asked.at - stalled_s - call.deadline_ms / 1000
            if late_s > SLACK_S:
                raise Wrong(f"{call} was answered {late_s:.3f} s after its deadline")
            is_shedding = self._of.faults.calm_s("stall") < LEARNS_S
            is_cut = self._of.faults.calm_s(f"cut {call.replica}") <= now - asked.at
            is_gone = reply.status == 409 and call.generation is not None
            may_fail = is_gone or is_shedding or is_cut
            if reply.status != 200 and asked.epoch is not None and not may_fail:
                raise Wrong(f"{call} was answered {reply}")
        if reply.status != 200:
            if reply.status not in (0, 409, 503):
                raise Wrong(f"{call} was answered {reply}")
            return [reply.status]
        answers = reply.body.get("answers", [reply.body])
        if len(answers) != len(call.questions):
            raise Wrong(f"{call} got {len(answers)} answers")
        live = {each["generation"] for each in answers if each["source"] != "previous"}
        if len(live) > 1:
            raise Wrong(f"two generations in one response to {call}: {live}")
        for question, answer in zip(call.questions, answers, strict=True):
            self._judge(asked, question, answer)
        return [(each["source"], each["generation"][-4:], each["items"][:2]) for each in answers]

    def _judge(self, asked: Asked, question: Question, answer: Mapping[str, Any]) -> None:
        call, sent = asked.call, self._of.sent[question.id]
        items = frozenset(each.decode() for each in asked.blocklist.items)
        judge(call, question, answer, items, {each for each, _ in sent.items()})
        self._demand_current(asked, answer)
        raw = question.id.encode()
        is_barred = raw in asked.blocklist.entities or raw in asked.blocklist.users
        if is_barred and (answer["source"] != "default" or answer["reason"] != "entity_blocked"):
            raise Wrong(f"{question} is blocked and got {answer}")
        if answer.get("reason") == "internal_error":
            raise Wrong(f"{question} of {call} got {answer}")
        # One that was under way when Redis came back may know better than when it was asked.
        away_s = min(asked.redis_away_s, self._away_s(self._of.replicas[asked.call.replica]))
        if away_s > STALE_S and "stale" not in answer:
            raise Wrong(f"without Redis for {away_s:.1f} s: {answer}")
        if answer.get("reason") == "corrupt":
            raise Wrong(f"nothing is corrupt here: {answer}")
        if answer["producer"] == "live" and answer["source"] in STORED:
            of = [at for history, at in sent.items() if question.history in ((), history)]
            at = max(of, default=0.0)
            if self._of.loop.time() - at > FORGOTTEN_S + LEARNS_S:
                raise Wrong(f"older than it may get: {answer}")
        if self._of.faults.calm_s() > LEARNS_S and asked.service is not None:
            self._demand_learnt(asked, question, answer)

    def _demand_current(self, asked: Asked, answer: Mapping[str, Any]) -> None:
        """Never backwards: what was live when the call began, or came later."""
        generation, pinned = answer["generation"], asked.call.generation
        if pinned is not None and generation != pinned:
            raise Wrong(f"{pinned} was pinned, and {answer} came")
        if answer["source"] == "previous" or asked.epoch is None or pinned is not None:
            return
        later = {each for epoch, each in self._epochs.items() if epoch >= asked.epoch}
        if generation not in {asked.live, *later, *self._tried}:
            raise Wrong(f"{asked.live} was live, and {answer} came")

    def _demand_learnt(self, asked: Asked, question: Question, answer: Mapping[str, Any]) -> None:
        """In calm: what was written down some time ago is known, and what is stored is found."""
        if self._up_s(asked.host) < LEARNS_S:
            return
        if self._of.faults.calm_s() < self._of.loop.time() - self._probed.get(asked.host, 0.0):
            self._probed.pop(asked.host, None)
        before = [each for at, each in self._blocklists if at < asked.at - LEARNS_S]
        since = [each for at, each in self._blocklists if at >= asked.at - LEARNS_S]
        if before:
            items = {each.decode() for each in before[-1].items} & {*answer["items"]}
            freed = {each for each in items for later in since if each.encode() not in later.items}
            if items - freed:
                raise Wrong(f"blocked {LEARNS_S} s ago: {items - freed} in {answer}")
        number = nights.number_of(answer["generation"])
        if answer["source"] != "l1":
            self._probed.setdefault(asked.host, asked.at)
        is_plain = not asked.call.exclude and not question.history and not asked.call.fresh
        if answer["source"] == "default" and nights.knows(number, question.id) and is_plain:
            reason = answer["reason"]
            # After an outage one call at a time finds out that it is over.
            is_probing = reason == "breaker_open" and asked.at < self._probed[asked.host] + 1.0
            if reason in ("l2_down", "l2_timeout", "breaker_open") and not is_probing:
                raise Wrong(f"Redis is there, and {question} got {answer}")
            if reason == "page_missing" and answer["generation"] in asked.loaded:
                raise Wrong(f"the page is there, and {question} got {answer}")

    def _up_s(self, host: Host) -> float:
        return self._of.loop.time() - host.up_since

    # -- every step

    def step(self) -> None:
        """Looks at every replica."""
        for replica in self._of.replicas:
            if replica.service is not None:
                self._look(replica, replica.service)
        if self._of.models.twice:
            raise Broken(self._of.models.twice[0])
        if self._of.errors:
            raise Broken(f"logged: {self._of.errors[0]}")

    def _look(self, replica: Replica, service: Service) -> None:
        held = service.follower.holding
        if held is None:
            return
        epoch, version = held.live.epoch, held.live.blocklist.version
        before = self._seen.get(replica.host, (0, -1))
        if epoch < before[0] or version < before[1]:
            raise Broken(f"{replica.host.name} went back from {before} to {(epoch, version)}")
        self._seen[replica.host] = epoch, version
        for each in held.generations:
            self._held_since(replica, each)
        if len({each.blocklist.version for each in held.snapshots}) > 1:
            raise Broken(f"{replica.host.name} holds two blocklists")
        raw = self._of.redis.data.get(self._of.keys.live)
        pointer = None if raw is None else Pointer.from_bytes(raw)
        now = self._of.loop.time()
        if (
            pointer is None
            or now - self._moved_at < LEARNS_S
            or self._up_s(replica.host) < LEARNS_S
        ):
            return
        # What is held already waits for no store, however it hangs.
        is_at_hand = service.follower.shelf.held(pointer.generation) is not None
        away = ("redis", f"link held {replica.number}", f"cut {replica.number}", "stall", "bytes")
        calm_s = self._of.faults.calm_s(*away) if is_at_hand else self._of.faults.calm_s()
        if calm_s > 2 * LEARNS_S and epoch < pointer.epoch:
            raise Broken(f"{replica.host.name} does not follow {pointer}: {held.roles}")
        previous = held.previous.generation if held.previous else pointer.previous
        if calm_s > 2 * LEARNS_S and epoch == pointer.epoch and previous != pointer.previous:
            raise Broken(f"{replica.host.name} holds {held.roles}, the pointer is {pointer}")
        if self._of.faults.calm_s() > MENDS_S and held.live.degraded is not None:
            raise Broken(f"{replica.host.name} stays degraded: {held.live.degraded}")

    # -- the end

    def rest(self, replica: Replica) -> None:
        """After calm without calls: nothing is under way, and what was counted adds up."""
        service = replica.service
        if service is None:
            raise Broken(f"{replica.host.name} does not come up again")
        health = service.follower.health
        is_well = health.ready and health.stale is None and health.degraded is None
        if self._epochs and not is_well:
            raise Broken(f"{replica.host.name} is not well: {health}")
        demand_nothing_left(replica.host.name, service)
        demand_sums(replica.host.name, service)

    def gone(self, replica: Replica, host: Host) -> None:
        """After it was stopped: no task of it is left."""
        left = [each for each in self._of.tasks_of(host) if not each.done()]
        if left:
            raise Broken(f"{replica.host.name} has stopped, and {left[0]} goes on")
