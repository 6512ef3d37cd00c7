"""A simulation: replicas, Redis, store, publisher and callers of one seed, and the rules that hold at every step."""

import asyncio
import contextlib
import gc
import hashlib
import logging
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import redis

from cache.errors import ConfigError, LarderError
from cache.format.redis_keys import Keyspace
from cache.native import loader, pure
from cache.process.host import disk_free_bytes, memory_available_bytes
from cache.store.artefacts import read_manifest
from cache.store.blocklist import Blocklist
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.process.resources import freeze_objects
from serving.replica.namespace import ServedNamespace
from tests.simulation import nights, substitution
from tests.simulation.callers import Call, Client, Reply
from tests.simulation.faults import Faults, NoThread
from tests.simulation.leftovers import Broken
from tests.simulation.models import Models
from tests.simulation.nights import TABLE
from tests.simulation.publisher import MODELLED, Publisher
from tests.simulation.redis_server import Session, SimulatedRedis
from tests.simulation.replicas import REDIS_PORT, Replica, settings
from tests.simulation.rules import FORGOTTEN_S, Rules
from tests.simulation.scenarios import REPLICAS, Step
from tests.simulation.store import SimulatedStore, StoreTrouble
from tests.simulation.threads import TRACED_SHARE, Lock, Pool, Threads
from tests.simulation.virtual_loop import HOST, Host, VirtualLoop, context_of
from tests.simulation.wires import Wires

START = 1_000.0
WALL = 1_800_100_000.0
OPENS_S = 1.5
"""Seconds that a generation takes to open at most."""

CALM_S = 60.0
"""Seconds after the last step in which nothing goes wrong."""

NO_NEWS = (
    "cannot be loaded",
    "cannot be staged",
    "release records cannot be read",
    "cannot be held",
    "cannot be put in force",
)
"""Parts of what is rightly logged as an error while the store or a model is out of order."""


class Simulation:
    """A simulation; see the module. `run` raises Broken when a rule does not hold; it needs `installed`."""

    def __init__(self, seed: int, steps: Sequence[Step], *, traced_share: float = TRACED_SHARE) -> None:
        self.seed, self.steps = seed, steps
        self.lines: list[str] = []
        self.keys = Keyspace(nights.OWN_NAMESPACE)
        self.wires = Wires(self._rng("wires"))
        self.loop = VirtualLoop(self.wires, START)
        self.wires.loop = self.loop
        self.chance = self._rng("chance")
        self.threads = Threads(self.loop, self._rng("threads"), traced_share)
        self.trouble = StoreTrouble()
        self.broken_arms: list[str] = []
        """Namespaces of arms that cannot be opened."""
        self.threadless: list[tuple[str, str]] = []
        """Hosts, and namespaces of theirs, that start no thread to put a blocklist in force."""
        self.stores = {
            name: SimulatedStore(name, self.threads, self._rng(f"store {name}"), self.trouble)
            for name in nights.FIRST_NIGHTS
        }
        self.redis = SimulatedRedis(self.keys, self._redis_time, self._pause)
        self.models = Models(self.threads)
        self.publishers = {name: Publisher(self.redis, store, Keyspace(name)) for name, store in self.stores.items()}
        self.faults = Faults(self)
        self.rules = Rules(self)
        self.models.can_talk = self.rules.can_talk
        self.redis.moved = lambda _previous_raw, after: self.rules.moved(after)
        self.publishers[nights.OWN_NAMESPACE].blocked = self.rules.blocked
        self.publishers[nights.OWN_NAMESPACE].experimented = self.rules.experimented
        self.replicas = [
            Replica(number, self.loop, lambda: settings(self.store, overlay_ttl_s=FORGOTTEN_S))
            for number in range(REPLICAS)
        ]
        self.sent_histories_by_id: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        """Histories that were sent with an id, and when each was last."""
        self.answered: Counter[str] = Counter()
        self.errors: list[str] = []
        self._wrong: BaseException | None = None
        self._work: dict[asyncio.Task[Any], None] = {}
        self._tasks: list[tuple[Host | None, asyncio.Task[Any]]] = []
        self._clients: dict[int, list[Client]] = {}

    def run(self) -> str:
        """Run all steps, then a calm time, then stop everything; return the hash of what happened."""
        gc.collect()  # of the simulation before this one: see `installed`
        substitution.forget()
        nights.forget()
        _CURRENT.append(self)
        self.loop._default_executor = ScarcePool(self)  # type: ignore[attr-defined]
        self.loop.set_exception_handler(self._unhandled)
        self.loop.set_task_factory(self._new_task)
        self.wires.listening[REDIS_PORT] = lambda: Session(self.redis), context_of(None)
        try:
            self.loop.run_until_complete(self._main())
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        finally:
            self._close()
            _CURRENT.pop()
        return self.digest

    @property
    def digest(self) -> str:
        """Hash of all that happened, which is always the same for one seed."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]

    def log(self, *parts: Any) -> None:
        """Record what happens."""
        self.lines.append(f"{self.loop.time() - START:9.4f} {' '.join(map(str, parts))}")

    # -- the process, as `substitution.Process`

    def monotonic(self) -> float:
        """Return virtual seconds."""
        return self.loop.time()

    def wall(self) -> float:
        """Return Unix seconds on the host of the running code."""
        host = HOST.get()
        return self._redis_time() + (host.clock_ahead_s if host else 0.0)

    def sleep(self, seconds: float) -> None:
        """Wait in a thread."""
        self.threads.sleep(seconds)

    def rng(self) -> random.Random:
        """Return the random numbers for code that draws without a seed."""
        return self.chance

    def pool(self, workers: int = 4, *_name: Any, **_options: Any) -> Pool:
        """Return a thread pool."""
        return Pool(self.threads, workers)

    def lock(self) -> Lock:
        """Return a lock."""
        return Lock(self.threads)

    def open(self, store: Any, generation: str, epoch: int, at: float, blocklist: Blocklist) -> Snapshot:
        """Replace `Snapshot.open`: read the manifest, take all else from memory."""
        number = nights.number_of(read_manifest(store, generation).generation)
        self.threads.sleep(self.threads.rng.random() * OPENS_S)
        model = self.models.open(number)
        return nights.snapshot(number, model).released_as(epoch, at).with_blocklist(blocklist)

    def store(self, namespace: str) -> SimulatedStore:
        """Return a namespace's part of the store; raise ConfigError while it cannot be opened."""
        if namespace in self.broken_arms:
            raise ConfigError(f"the settings of {namespace} cannot be read")
        return self.stores[namespace]

    def is_loaded(self, generation: str) -> bool:
        """Return whether Redis has every page of a generation."""
        number = nights.number_of(generation)
        pages, keys = nights.night(number).pages, Keyspace(nights.namespace_of(number))
        names = [keys.page(generation, TABLE, page) for page in range(len(pages))]
        return all(name in self.redis.data for name in names)

    def tasks_of(self, host: Host) -> list[asyncio.Task[Any]]:
        """Return the tasks that began in one process."""
        return [task for of, task in self._tasks if of is host]

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed} {purpose}")

    def _redis_time(self) -> float:
        return WALL + self.loop.time() - START

    def _pause(self, command: str, name: str) -> None:
        """Pause the publisher before a command."""
        if command == "unlink" and name in self.redis.data:  # a restore removes once more what is gone
            self.rules.removing(name)
        work, rng = self.threads.current, self.threads.rng
        if work is not None and rng.random() < 0.1:
            work.pause(rng.random() * 0.05)

    def _new_task(self, loop: Any, coro: Any, **options: Any) -> Any:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
        context = options.get("context")
        self._tasks.append((HOST.get() if context is None else context.get(HOST), task))
        return task

    def _unhandled(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._wrong = self._wrong or error or Broken(context["message"])

    # -- what happens

    async def _main(self) -> None:
        for starting_replica in self.replicas:
            self._start(starting_replica)
        for step in self.steps:
            await asyncio.sleep(max(0.0, START + step.at - self.loop.time()))
            self._check()
            self.log("step", step.kind, *step.arguments)
            self._happen(step)
        await asyncio.sleep(1.0)
        self.faults.end_all()
        for _ in range(2):  # what a writer left half done is over by the second time
            self._restore()
            await asyncio.sleep(CALM_S / 2)
        self._check()
        if pending := [task for task in self._work if not task.done()]:
            raise Broken(f"{pending[0]} never ends")
        for replica in self.replicas:
            self.rules.check_at_rest(replica)
        for replica in self.replicas:
            host = replica.host
            await replica.stop()
            await asyncio.sleep(1.0)
            self.rules.check_stopped(replica, host)
        self._check()

    def _check(self) -> None:
        if self._wrong is not None:
            raise self._wrong
        self.rules.step()

    def _happen(self, step: Step) -> None:
        kind, arguments = step.kind, step.arguments
        match kind:
            case "ask" | "burst" | "crowd":
                for call in step.calls:
                    self._spawn(self._call(call))
            case "night" | "bad night":
                self._publish("night", kind == "night")
            case "roll_back" | "canary" | "end_canary" | "retire" | "block" | "unblock":
                self._publish(kind, *arguments)
            case "experiment" | "stop experiment" | "change share":
                self._publish(kind.replace(" ", "_"), *arguments)
            case "arm night":
                self._publish("night", True, namespace=arguments[0])
            case "restore":
                self._restore()
            case "kill":
                self._kill(self.replicas[arguments[0]], arguments[1])
            case "restart":
                self._spawn(self._restart(self.replicas[arguments[0]]))
            case "save":
                self.redis.save()
            case "clock":
                self.replicas[arguments[0]].host.clock_ahead_s += arguments[1]
            case "stall":
                self.loop.stall(arguments[0])
                self.faults.happened("stall")
            case "cut":
                host = self.replicas[arguments[0]].host
                self.wires.cut(lambda wire: wire.host is host)
                self.faults.happened(f"cut {arguments[0]}")
            case _:
                self.faults.begin(kind, arguments, random.Random(step.seed))

    def _publish(self, name: str, *arguments: Any, namespace: str = nights.OWN_NAMESPACE) -> None:
        def work() -> None:
            outcome = self.publishers[namespace].run(name, *arguments)
            of_arm = () if namespace == nights.OWN_NAMESPACE else (namespace,)
            self.log(name, *of_arm, *arguments, "->", outcome)

        self.threads.begin(work, 0.0)

    def _restore(self) -> None:
        for namespace, store in self.stores.items():
            if namespace == nights.OWN_NAMESPACE or store.files:
                self._publish("restore", namespace=namespace)

    def _start(self, replica: Replica) -> None:
        if replica.is_down:
            self._watch(replica.start())

    def _watch(self, task: asyncio.Task[Any]) -> None:
        self._work[task] = None
        task.add_done_callback(self._finish_task)

    def _spawn(self, work: Any) -> None:
        self._watch(self.loop.create_task(work))

    def _finish_task(self, task: asyncio.Task[Any]) -> None:
        self._work.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self._wrong = self._wrong or task.exception()

    def _kill(self, replica: Replica, after_s: float) -> None:
        host = replica.host
        for task in self.tasks_of(host):
            self._work.pop(task, None)
        replica.kill()
        self.wires.listening.pop(replica.port, None)
        self.wires.cut(lambda wire: wire.host is host)
        self.faults.happened(f"kill {replica.number}")
        self.loop.call_later(after_s, self._start, replica, context=context_of(None))

    async def _restart(self, replica: Replica) -> None:
        if replica.is_up:
            host, stopping = replica.host, replica.stop()
            while not (stopping.done() or host.is_dead):
                await asyncio.wait({stopping}, timeout=1.0)
            await asyncio.sleep(0.5)
            if not host.is_dead:
                self.rules.check_stopped(replica, host)
                self._start(replica)
            self.faults.happened(f"restart {replica.number}")

    # -- calls

    async def _call(self, call: Call) -> None:
        replica = self.replicas[call.replica]
        for question in call.questions:
            if question.history:
                self.sent_histories_by_id[question.id][question.history] = self.loop.time()
        call_context = self.rules.begin_call(call, replica)
        asking = self.loop.create_task(self._fetch_reply(call.request(), replica, call.leaves_after_s))
        try:
            reply = await asking
        finally:
            self.rules.end_call(call)
        if reply is not None:
            answer_notes = self.rules.answered(call_context, reply)
            self.rules.step()
            self.answered.update(note[0] if isinstance(note, tuple) else str(note) for note in answer_notes)
            self.log("answer", call.replica, *answer_notes)

    async def _fetch_reply(self, request: bytes, replica: Replica, leaves_after_s: float | None) -> Reply | None:
        """The reply; a connection that was kept too long is replaced by another one. None: the caller left."""
        idle_clients = self._clients.setdefault(replica.port, [])
        while (client := idle_clients.pop() if idle_clients else await self._connected(replica)) is not None:
            asking = self.loop.create_task(client.send_request(request))
            await asyncio.wait({asking}, timeout=leaves_after_s)
            if not asking.done():
                client.leave()
                await asyncio.wait({asking})
                return None
            reply = asking.result()
            if reply.status == 0 and client.answers:
                continue
            if not client.is_lost:
                idle_clients.append(client)
            return reply
        return None

    async def _connected(self, replica: Replica) -> Client | None:
        client = Client()
        try:
            await self.wires.connect(client, replica.port)
        except OSError:
            return None
        return client

    def _close(self) -> None:
        self.threads.stop()
        sys.unraisablehook = _unheard
        for _, task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine: Any = task.get_coro()
                with contextlib.suppress(BaseException):
                    coroutine.close()
        self.loop.close()


class ScarcePool(Pool):
    """The default threads of all hosts; some hosts start none to put a blocklist in force."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.threads, 8)
        self._simulation = simulation

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue the call; raise NoThread as a process at its limit does."""
        host, work = HOST.get(), getattr(fn, "args", ())
        name, threadless = "" if host is None else host.name, self._simulation.threadless
        for call in work if threadless else ():
            served = getattr(call, "__self__", None)
            if isinstance(served, ServedGenerations) and call.__name__ == "with_blocklist":
                namespace = nights.namespace_of(nights.number_of(served.live.generation))
                if (name, namespace) in threadless:
                    raise NoThread("can't start new thread")
        return super().submit(fn, *args, **kwargs)


_CURRENT: list[Simulation] = []


class _CurrentSimulation:
    """The current simulation, as the process from which code takes its clocks and threads."""

    def monotonic(self) -> float:
        """Return virtual seconds, by the shortest way, since this is called most."""
        return _CURRENT[-1].loop.time()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: getattr(_CURRENT[-1], name)(*arguments, **options)


class _Errors(logging.Handler):
    """Collects errors that are logged, except expected ones."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error for the rules."""
        message, error = record.getMessage(), record.exc_info and record.exc_info[1]
        of_world = LarderError | OSError | redis.exceptions.RedisError | NoThread
        is_of_world = not error or isinstance(error, of_world)  # `traceback_of` leaves out errors of Larder's own
        is_news = not (is_of_world and any(expected_part in message for expected_part in NO_NEWS))
        if _CURRENT and is_news and record.name != "larder.requests":
            _CURRENT[-1].errors.append(f"{message}: {error!r}")


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within the block, this process runs simulations, one after the other."""
    substitution.import_all()
    replaced = {
        **substitution.replacements(_CurrentSimulation()),
        **MODELLED,
        freeze_objects: lambda: None,
        memory_available_bytes: lambda: 1 << 30,
        disk_free_bytes: lambda _folder: 1 << 30,
    }

    def opened(
        store: Any, generation: str, *, epoch: int, published_at: float, blocklist: Blocklist, **_: Any
    ) -> Snapshot:
        return _CURRENT[-1].open(store, generation, epoch, published_at, blocklist)

    async def start(self: ServedNamespace) -> None:
        _CURRENT[-1].rules.arm_begins(self)
        await real_start(self)

    async def aclose(self: ServedNamespace) -> None:
        try:
            await real_aclose(self)
        finally:
            _CURRENT[-1].rules.arm_ended(self)

    real_start, real_aclose = ServedNamespace.start, ServedNamespace.aclose
    real_open, kernels, hook = Snapshot.__dict__["open"], loader.kernels, sys.unraisablehook
    root, errors = logging.getLogger(), _Errors(logging.ERROR)
    Snapshot.open = opened  # type: ignore[method-assign]
    ServedNamespace.start, ServedNamespace.aclose = start, aclose  # type: ignore[method-assign]
    loader.kernels = pure
    handlers, root.handlers = root.handlers, [errors]
    # A garbage collection closes coroutines in the middle of other work. So collect between simulations only, and skip
    # what the process has imported.
    gc.disable()
    gc.freeze()
    try:
        with substitution.substituted(replaced), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines of dead hosts
            yield
    finally:
        gc.unfreeze()
        gc.enable()
        root.handlers = handlers
        Snapshot.open, loader.kernels = real_open, kernels  # type: ignore[method-assign]
        ServedNamespace.start, ServedNamespace.aclose = real_start, real_aclose  # type: ignore[method-assign]
        sys.unraisablehook = hook


def _unheard(_unraisable: Any) -> None:
    """Ignore the errors of what is left of a dead host."""
