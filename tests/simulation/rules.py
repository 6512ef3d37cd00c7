"""The rules that hold at every step of a simulation, whatever went wrong."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cache.format.ids import fingerprint
from cache.store.blocklist import Blocklist
from cache.store.releases import Pointer
from cache.traffic.experiments import Experiments
from serving.http.routes import Service
from serving.replica.namespace import ServedNamespace
from serving.requests.answers import STORED_SOURCES
from serving.traffic.arms import ArmState
from tests.simulation import nights
from tests.simulation.callers import Call, CallContext, Question, Reply, ServedState, Wrong, judge
from tests.simulation.leftovers import Broken, demand_nothing_left, demand_sums
from tests.simulation.replicas import Replica
from tests.simulation.virtual_loop import HOST, Host

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

RETRIED_S = 40.0
"""Calm seconds within which a namespace that could not be opened is tried again, and loaded."""

CALM_S = 3.0
"""Calm seconds after which processes can talk: a slow model outlasts the wait for whoever computes, then both do."""


class WrittenExperiments:
    """A version of the experiments and its time; the arm of a key is computed in the simplest way."""

    def __init__(self, written_at: float, record: Experiments) -> None:
        self.written_at, self.record = written_at, record
        self._layer = record.owners
        self._arms = {experiment.name: experiment.owners for experiment in record.running}

    def owner(self, key: bytes) -> tuple[str | None, str | None]:
        """Return experiment and arm of the key; None twice if it has none."""
        experiment = self._layer.owner_of(key)
        if experiment is None or experiment not in self._arms:
            return None, None
        return experiment, self._arms[experiment].owner_of(key)


class Rules:
    """Rules of one simulation."""

    def __init__(self, simulation: "Simulation") -> None:
        self._of = simulation
        self._epochs: defaultdict[str, dict[int, str]] = defaultdict(dict)
        """Every pointer of each namespace that was ever in place: epoch -> generation."""
        self._tried: set[str] = set()
        self._moved_at = 0.0
        self._first_at: dict[str, float] = {}
        """Namespace -> when it had its first pointer."""
        self._records: list[WrittenExperiments] = []
        """Versions of the experiments, the newest last."""
        self._open_arms: Counter[tuple[Host, str]] = Counter()
        """Copies of each namespace that a process has opened and not closed."""
        self._obeyed: dict[Host, tuple[Blocklist, float]] = {}
        """Process -> blocklist that its own namespace obeys, and since when."""
        self._blocklists: list[tuple[float, Blocklist]] = []
        self._progress_by_host: dict[Host, tuple[int, int]] = {}
        """Process -> greatest epoch and version of the blocklist that it had."""
        self._first_held_at: dict[tuple[Host, str], float] = {}
        """Process and generation -> since when it was seen to be held."""
        self._probed: dict[tuple[Host, str], float] = {}
        """Process and namespace -> the first call in this calm that L1 did not answer."""
        self._probing_at = float("-inf")
        self._waiting: defaultdict[int, dict[int, float]] = defaultdict(dict)
        """Fingerprint of an entity -> when each call with it stops waiting for another process."""

    # -- told of

    def moved(self, raw: bytes) -> None:
        """Note a pointer that is now in place."""
        pointer = Pointer.from_bytes(raw)
        namespace = nights.namespace_of(nights.number_of(pointer.generation))
        self._epochs[namespace][pointer.epoch] = pointer.generation
        self._first_at.setdefault(namespace, self._of.loop.time())
        if namespace == nights.OWN_NAMESPACE:
            self._moved_at = self._of.loop.time()
        if pointer.canary is not None:
            self._tried.add(pointer.canary.generation)

    def blocked(self, blocklist: Blocklist) -> None:
        """Note a version of the blocklist that is now in the store."""
        self._blocklists.append((self._of.loop.time(), blocklist))

    def experimented(self, record: Experiments) -> None:
        """Note a version of the experiments that is now in the store."""
        if not self._records or record.version > self._records[-1].record.version:
            self._records.append(WrittenExperiments(self._of.loop.time(), record))

    def arm_begins(self, arm: ServedNamespace) -> None:
        """Check that an arm's namespace about to load is not loaded already."""
        host, namespace = (HOST.get(), arm.held_namespace.components.remote.control.keyspace.namespace)
        assert host is not None
        self._open_arms[host, namespace] += 1
        if self._open_arms[host, namespace] > 1:
            raise Broken(f"{host.name} has opened {namespace} twice")

    def arm_ended(self, arm: ServedNamespace) -> None:
        """Note that an arm's namespace was closed."""
        host, namespace = (HOST.get(), arm.held_namespace.components.remote.control.keyspace.namespace)
        assert host is not None
        self._open_arms[host, namespace] = 0

    def removing(self, name: str) -> None:
        """Check that a key about to be removed is of no generation that a replica has reported as held."""
        generation = name.split(":")[4] if ":g:" in name else ""
        for replica in self._of.replicas:
            if replica.service is None or self._up_s(replica.host) < LEARNS_S:
                continue
            fault_names = ("redis", f"link held {replica.number}", f"cut {replica.number}", "stall")
            holds_s = self._of.loop.time() - self._held_since(replica, generation)
            if generation in replica.service.follower.holder.generations and (
                min(holds_s, self._of.faults.calm_s(*fault_names)) > LEARNS_S
            ):
                raise Broken(f"{name} goes, {replica.host.name} holds it")

    def _held_since(self, replica: Replica, generation: str) -> float:
        return self._first_held_at.setdefault((replica.host, generation), self._of.loop.time())

    def can_talk(self, fingerprint: int) -> bool:
        """Return whether processes could coordinate their inferences: after calm, with Redis reachable for all of them.

        After an outage the first call finds out that it is over; those beside it have no lease. Who has waited long
        enough for another process' answer computes it as well.
        """
        now_s = self._of.loop.time()
        has_waited = any(now_s >= alone_at for alone_at in self._waiting[fingerprint].values())
        return self._of.faults.calm_s() > CALM_S < now_s - self._probing_at and not has_waited

    # -- calls

    def begin_call(self, call: Call, replica: Replica) -> CallContext:
        """Return the state known as a call begins."""
        service, services = replica.service, replica.services
        if any(lookup_service.tiers._remote.stats.breaker_state != "closed" for lookup_service in services.values()):
            self._probing_at = self._of.loop.time()
        served_by_name = {name: lookup_service.follower.served for name, lookup_service in services.items()}
        holdings = {name: served for name, served in served_by_name.items() if served is not None}
        for question in call.questions:
            # A process waits for another one for half of the time that a live answer may take, which is 3/4 of the
            # call's time.
            caller_s = min(call.deadline_ms, DEADLINE_MS) / 1000
            alone_at = self._of.loop.time() + min(0.2, caller_s * 0.75 / 2)
            self._waiting[fingerprint(question.id.encode())].setdefault(id(call), alone_at)
        return CallContext(
            call, self._of.loop.time(), replica.host, service,
            {
                name: ServedState(served.live.epoch, served.live.generation, served.live.blocklist)
                for name, served in holdings.items()
            },
            self._of.loop.stalled_s,
            self._away_s(replica),
            frozenset(
                generation for served in holdings.values() for generation in served.generations
                if self._of.is_loaded(generation)
            ),
        )  # fmt: skip

    def _away_s(self, replica: Replica) -> float:
        """Return the seconds for which a replica has not been able to reach Redis."""
        return self._of.faults.lasting_s("redis down", "redis held", f"link held {replica.number}")

    def end_call(self, call: Call) -> None:
        """Note that a call was answered or its caller left."""
        for question in call.questions:
            self._waiting[fingerprint(question.id.encode())].pop(id(call), None)

    def answered(self, call_context: CallContext, reply: Reply) -> list[Any]:
        """Judge a reply; return a line about it for the log."""
        call, now_s = call_context.call, self._of.loop.time()
        replica = self._of.replicas[call.replica]
        if call_context.service is not None and replica.host is call_context.host and replica.is_up:
            stalled_s = self._of.loop.stalled_s - call_context.stalled_s
            late_s = now_s - call_context.at - stalled_s - call.deadline_ms / 1000
            if late_s > SLACK_S:
                raise Wrong(f"{call} was answered {late_s:.3f} s after its deadline")
            is_shedding = self._of.faults.calm_s("stall") < LEARNS_S
            is_cut = self._of.faults.calm_s(f"cut {call.replica}") <= now_s - call_context.at
            is_gone = reply.status == 409 and call.generation is not None
            may_fail = is_gone or is_shedding or is_cut
            if reply.status != 200 and nights.OWN_NAMESPACE in call_context.served_by_namespace and not may_fail:
                raise Wrong(f"{call} was answered {reply}")
        if reply.status != 200:
            if reply.status not in (0, 409, 503):
                raise Wrong(f"{call} was answered {reply}")
            return [reply.status]
        answers = reply.body.get("answers", [reply.body])
        if len(answers) != len(call.questions):
            raise Wrong(f"{call} got {len(answers)} answers")
        live = {answer["generation"] for answer in answers if answer["source"] != "previous"}
        if len(live) > 1:
            raise Wrong(f"two generations in one response to {call}: {live}")
        for question, answer in zip(call.questions, answers, strict=True):
            self._judge(call_context, question, answer)
        return [(answer["source"], answer["generation"][-4:], answer["items"][:2]) for answer in answers]

    def _judge(self, call_context: CallContext, question: Question, answer: Mapping[str, Any]) -> None:
        call, sent_at_by_history = call_context.call, self._of.sent_histories_by_id[question.id]
        namespace = nights.namespace_of(nights.number_of(answer["generation"]))
        known_state = call_context.served_by_namespace.get(namespace)
        blocklist = call_context.blocklist if known_state is None else known_state.blocklist
        items = frozenset(raw_item.decode() for raw_item in blocklist.items)
        judge(call, question, answer, items, {history for history, _ in sent_at_by_history.items()})
        self._demand_current(call_context, namespace, answer)
        self._demand_routed(call_context, namespace, answer)
        raw = question.id.encode()
        is_barred = raw in blocklist.entities or raw in blocklist.users
        if is_barred and (answer["source"] != "default" or answer["reason"] != "entity_blocked"):
            raise Wrong(f"{question} is blocked and got {answer}")
        if answer.get("reason") == "internal_error":
            raise Wrong(f"{question} of {call} got {answer}")
        # A call that was under way when Redis came back may know more than at its start.
        away_s = min(call_context.redis_away_s, self._away_s(self._of.replicas[call_context.call.replica]))
        if away_s > STALE_S and "stale" not in answer:
            raise Wrong(f"without Redis for {away_s:.1f} s: {answer}")
        if answer.get("reason") == "corrupt":
            raise Wrong(f"nothing is corrupt here: {answer}")
        if answer["producer"] == "live" and answer["source"] in STORED_SOURCES:
            of = [at for history, at in sent_at_by_history.items() if question.history in ((), history)]
            at = max(of, default=0.0)
            if self._of.loop.time() - at > FORGOTTEN_S + LEARNS_S:
                raise Wrong(f"older than it may get: {answer}")
        # A fault of an arm does not excuse the service's own namespace.
        but = ("arm",) if namespace == nights.OWN_NAMESPACE else ()
        if self._of.faults.calm_s(but=but) > LEARNS_S and call_context.service is not None:
            self._demand_learnt(call_context, namespace, question, answer)

    def _demand_current(self, call_context: CallContext, namespace: str, answer: Mapping[str, Any]) -> None:
        """Demand a generation that was live when the call began or became live later."""
        generation, pinned = answer["generation"], call_context.call.generation
        if pinned is not None and generation != pinned:
            raise Wrong(f"{pinned} was pinned, and {answer} came")
        known_state = call_context.served_by_namespace.get(namespace)
        if answer["source"] == "previous" or known_state is None or pinned is not None:
            return
        pointers = self._epochs[namespace].items()
        later = {later_generation for epoch, later_generation in pointers if epoch >= known_state.epoch}
        if generation not in {known_state.live, *later, *self._tried}:
            raise Wrong(f"{known_state.live} was live, and {answer} came")

    def _demand_routed(self, call_context: CallContext, namespace: str, answer: Mapping[str, Any]) -> None:
        """Demand that an arm answers whole requests of keys that a version gave it, and all of them in calm."""
        label = answer.get("experiment"), answer.get("arm")
        call, now_s = call_context.call, self._of.loop.time()
        has_key = len(call.questions) == 1 and call.generation is None
        owners: list[tuple[str | None, str | None]] = [(None, None)]
        settled: tuple[str | None, str | None] | None = (None, None)
        of_arm: dict[tuple[str | None, str | None], str] = {(None, None): nights.OWN_NAMESPACE}
        for version in self._records if has_key else ():
            of_arm |= {
                (experiment.name, arm.name): arm.namespace
                for experiment in version.record.experiments
                for arm in experiment.arms
            }
            owners.append(owner := version.owner(call.questions[0].id.encode()))
            settled = owner if version.written_at < now_s - 2 * LEARNS_S else None
        if label not in owners or of_arm[label] != namespace:
            raise Wrong(f"{call} is of {owners[-1]}, and {answer} came")
        if settled is None or label == settled:
            return
        arm = of_arm[settled]
        first_at = self._first_at.get(arm, now_s)
        # A fault of one arm affects no other.
        other_arm_faults = tuple(
            f"arm {how} {name}" for how in ("hung", "broken") for name in nights.ARMS if name != arm
        )
        is_calm = self._of.faults.calm_s(but=other_arm_faults) > 2 * LEARNS_S < self._up_s(call_context.host)
        is_tried_again = self._of.faults.calm_s(f"arm broken {arm}") > RETRIED_S
        if is_calm and is_tried_again and now_s - first_at > 2 * LEARNS_S:
            raise Wrong(f"{call} is of {settled} for long, and {answer} came")

    def _demand_learnt(
        self, call_context: CallContext, namespace: str, question: Question, answer: Mapping[str, Any]
    ) -> None:
        """Demand, in calm, that records written some time ago are known, and stored answers are found."""
        if self._up_s(call_context.host) < LEARNS_S:
            return
        process = call_context.host, namespace
        if self._of.faults.calm_s() < self._of.loop.time() - self._probed.get(process, 0.0):
            self._probed.pop(process, None)
        known_blocklists = [blocklist for at, blocklist in self._blocklists if at < call_context.at - LEARNS_S]
        recent_blocklists = [blocklist for at, blocklist in self._blocklists if at >= call_context.at - LEARNS_S]
        if known_blocklists:
            items = {raw_item.decode() for raw_item in known_blocklists[-1].items} & {*answer["items"]}
            freed = {item for item in items for later in recent_blocklists if item.encode() not in later.items}
            if items - freed:
                raise Wrong(f"blocked {LEARNS_S} s ago: {items - freed} in {answer}")
        number = nights.number_of(answer["generation"])
        if answer["source"] != "l1":
            self._probed.setdefault(process, call_context.at)
        is_plain = not call_context.call.exclude and not question.history and not call_context.call.fresh
        if answer["source"] == "default" and nights.knows(number, question.id) and is_plain:
            reason = answer["reason"]
            # After an outage one call at a time tests whether it is over.
            is_probing = reason == "breaker_open" and call_context.at < self._probed[process] + 1.0
            if reason in ("l2_down", "l2_timeout", "breaker_open") and not is_probing:
                raise Wrong(f"Redis is there, and {question} got {answer}")
            if reason == "page_missing" and answer["generation"] in call_context.loaded:
                raise Wrong(f"the page is there, and {question} got {answer}")

    def _up_s(self, host: Host) -> float:
        return self._of.loop.time() - host.up_since

    # -- every step

    def step(self) -> None:
        """Check every replica."""
        for replica in self._of.replicas:
            if replica.service is not None:
                self._check_replica(replica, replica.service)
            elif not replica.is_down and not replica.is_stopping:
                starts_s = self._of.loop.time() - replica.started_at
                if min(starts_s, self._of.faults.calm_s(but=("arm",))) > 2 * LEARNS_S:
                    raise Broken(f"{replica.host.name} does not come up")
        if self._of.models.twice:
            raise Broken(self._of.models.twice[0])
        if self._of.errors:
            raise Broken(f"logged: {self._of.errors[0]}")

    def _check_replica(self, replica: Replica, service: Service) -> None:
        served = service.follower.served
        if served is None:
            return
        epoch, version = served.live.epoch, served.live.blocklist.version
        previous_seen = self._progress_by_host.get(replica.host, (0, -1))
        if epoch < previous_seen[0] or version < previous_seen[1]:
            raise Broken(f"{replica.host.name} went back from {previous_seen} to {(epoch, version)}")
        self._progress_by_host[replica.host] = epoch, version
        for generation in served.generations:
            self._held_since(replica, generation)
        self._demand_obedient(replica, served.live.blocklist)
        if len({snapshot.blocklist.version for snapshot in served.snapshots}) > 1:
            raise Broken(f"{replica.host.name} holds two blocklists")
        raw = self._of.redis.data.get(self._of.keys.live)
        pointer = None if raw is None else Pointer.from_bytes(raw)
        now_s = self._of.loop.time()
        if pointer is None or now_s - self._moved_at < LEARNS_S or self._up_s(replica.host) < LEARNS_S:
            return
        # A generation that is already held waits for no store, even if the store hangs.
        is_at_hand = service.follower.holder.find_snapshot(pointer.generation) is not None
        fault_names = ("redis", f"link held {replica.number}", f"cut {replica.number}", "stall", "bytes")
        calm_s = self._of.faults.calm_s(*fault_names) if is_at_hand else self._of.faults.calm_s()
        if calm_s > 2 * LEARNS_S and epoch < pointer.epoch:
            raise Broken(f"{replica.host.name} does not follow {pointer}: {served.generation_by_role}")
        previous = served.previous.generation if served.previous else pointer.previous
        if calm_s > 2 * LEARNS_S and epoch == pointer.epoch and previous != pointer.previous:
            raise Broken(f"{replica.host.name} holds {served.generation_by_role}, the pointer is {pointer}")
        if self._of.faults.calm_s() > MENDS_S and served.live.degraded_reason is not None:
            raise Broken(f"{replica.host.name} stays degraded: {served.live.degraded_reason}")

    def _demand_obedient(self, replica: Replica, blocklist: Blocklist) -> None:
        """Demand that an arm that answers leaves out what the service's own namespace has blocked for some time."""
        now_s = self._of.loop.time()
        obeyed_blocklist, obeyed_since = self._obeyed.get(replica.host, (None, now_s))
        if obeyed_blocklist is not blocklist:
            obeyed_since = now_s
        self._obeyed[replica.host] = blocklist, obeyed_since
        if now_s - obeyed_since < LEARNS_S or self._of.faults.calm_s("stall") < LEARNS_S:
            return
        for name, service in replica.services.items():
            live = service.follower.holder.live
            if live is None:
                continue
            lacking = blocklist.items - live.blocklist.items, blocklist.users - live.blocklist.users
            if any(lacking):
                raise Broken(f"{name} serves what {replica.host.name} has barred for long: {lacking}")

    # -- the end

    def check_at_rest(self, replica: Replica) -> None:
        """Check, after calm without calls, that nothing is under way and the counts add up."""
        service = replica.service
        if service is None:
            raise Broken(f"{replica.host.name} does not come up again")
        health = service.follower.health
        is_well = health.is_ready and health.stale_reason is None and health.degraded_reason is None
        if self._epochs[nights.OWN_NAMESPACE] and not is_well:
            raise Broken(f"{replica.host.name} is not well: {health}")
        self._demand_arms_held(replica)
        for lookup_service in replica.services.values():
            demand_nothing_left(replica.host.name, lookup_service)
        demand_sums(replica.host.name, service)

    def _demand_arms_held(self, replica: Replica) -> None:
        """Demand, after calm, that exactly the namespaces that experiments name are held, and all answer."""
        named = self._records[-1].record.namespaces(nights.OWN_NAMESPACE) if self._records else ()
        states = {} if replica.arms is None else replica.arms.state_by_namespace
        if states != dict.fromkeys(named, ArmState.SERVING):
            raise Broken(f"{replica.host.name} is to hold {named}: {states}")
        silent = {namespace for namespace in named if namespace in self._first_at} - replica.services.keys()
        if silent:
            raise Broken(f"{replica.host.name} holds {silent}, and does not answer from there")

    def check_stopped(self, replica: Replica, host: Host) -> None:
        """Check that no task of a stopped service is left, and no namespace is open."""
        still_open = [name for (of, name), count in self._open_arms.items() if of is host and count]
        if still_open:
            raise Broken(f"{replica.host.name} has stopped, and {still_open} are open")
        running_tasks = [task for task in self._of.tasks_of(host) if not task.done()]
        if running_tasks:
            raise Broken(f"{replica.host.name} has stopped, and {running_tasks[0]} goes on")
