"""Faults that last for a while, with what begins and ends each."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.redis_server import Session
from tests.simulation.replicas import REDIS_PORT
from tests.simulation.virtual_loop import context_of
from tests.simulation.wires import Link, Wire

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class NoThread(RuntimeError):
    """The process may start no more threads."""


class Faults:
    """Faults of one simulation; `calm_s` is the time without any."""

    def __init__(self, simulation: "Simulation") -> None:
        self._of = simulation
        self._lasting: dict[str, Callable[[], None]] = {}
        """What is wrong -> how it ends."""
        self._begun_at: dict[str, float] = {}
        self._ended_at: dict[str, float] = {}
        self.kinds: dict[str, Callable[..., Callable[[], None]]] = {
            "redis down": self._redis_down, "redis wiped": self._redis_wiped, "redis older": self._redis_older,
            "redis held": self._redis_held,
            "redis slow": self._redis_slow, "link held": self._link_held, "store hung": self._store_hung,
            "store failing": self._store_failing, "store torn": self._store_torn, "model slow": self._model_slow,
            "model fails": self._model_fails, "model broken": self._model_broken, "bytes torn": self._bytes_torn,
            "arm hung": self._arm_hung, "arm broken": self._arm_broken, "no threads": self._no_threads,
        }  # fmt: skip

    def begin(self, kind: str, arguments: tuple[Any, ...], rng: random.Random) -> None:
        """Begin a fault for `arguments[-1]` seconds, unless it already lasts."""
        name = " ".join(map(str, (kind, *arguments[:-1])))
        if name in self._lasting:
            return
        self._begun_at[name] = self._of.loop.time()
        self._lasting[name] = self.kinds[kind](rng, *arguments[:-1])
        loop = self._of.loop
        loop.call_later(arguments[-1], self.end, name, context=context_of(None))

    def end(self, name: str) -> None:
        """End a fault, if it lasts."""
        if (ends := self._lasting.pop(name, None)) is not None:
            ends()
            self.happened(name)

    def end_all(self) -> None:
        """End all faults."""
        for name in list(self._lasting):
            self.end(name)

    def happened(self, fault_name: str) -> None:
        """Note a fault that is over at once: a restart, a cut."""
        self._of.log("over", fault_name)
        self._ended_at[fault_name] = self._of.loop.time()

    def calm_s(self, *about: str, but: tuple[str, ...] = ()) -> float:
        """Seconds without any fault, or without one whose name begins so, except those that begin as in `but`."""
        now_s = self._of.loop.time()

        def counts(name: str) -> bool:
            return (not about or name.startswith(about)) and not name.startswith(but)

        if any(counts(name) for name in self._lasting):
            return 0.0
        return now_s - max([at for name, at in self._ended_at.items() if counts(name)], default=0.0)

    def lasting_s(self, *names: str) -> float:
        """Return the seconds since the oldest of these faults began, 0 without any."""
        begin_times = [self._begun_at[name] for name in names if name in self._lasting]
        return self._of.loop.time() - min(begin_times) if begin_times else 0.0

    # -- each kind begins, and returns how it ends

    def cut_redis(self) -> None:
        """Close every connection to Redis."""
        self._of.wires.cut(_is_redis)

    def _redis_down(self, _rng: random.Random) -> Callable[[], None]:
        listening = self._of.wires.listening
        redis_listener = listening.pop(REDIS_PORT)
        self.cut_redis()
        return lambda: listening.update({REDIS_PORT: redis_listener})

    def _redis_wiped(self, _rng: random.Random) -> Callable[[], None]:
        self._of.redis.wipe()
        self.cut_redis()
        return _do_nothing

    def _redis_older(self, _rng: random.Random) -> Callable[[], None]:
        self._of.redis.load()
        self.cut_redis()
        return _do_nothing

    def _redis_held(self, _rng: random.Random) -> Callable[[], None]:
        links = [self.link(replica.number) for replica in self._of.replicas]
        for link in links:
            link.hold_count += 1

        def ends() -> None:
            for link in links:
                self._of.wires.release(link)

        return ends

    def _redis_slow(self, rng: random.Random) -> Callable[[], None]:
        links, slow_s = ([self.link(replica.number) for replica in self._of.replicas], rng.choice([0.005, 0.04, 0.2]))
        for link in links:
            link.slow_s = slow_s

        def ends() -> None:
            for link in links:
                link.slow_s = 0.0

        return ends

    def _link_held(self, _rng: random.Random, number: int) -> Callable[[], None]:
        link = self.link(number)
        link.hold_count += 1
        return lambda: self._of.wires.release(link)

    def _store_hung(self, _rng: random.Random, number: int | None) -> Callable[[], None]:
        name = "" if number is None else self._of.replicas[number].host.name
        hung = self._of.trouble.hung
        hung.append(name)
        return lambda: hung.remove(name)

    def _store_failing(self, _rng: random.Random) -> Callable[[], None]:
        self._of.trouble.is_failing = True
        return lambda: setattr(self._of.trouble, "is_failing", False)

    def _store_torn(self, _rng: random.Random) -> Callable[[], None]:
        self._of.trouble.torn = 0.5
        return lambda: setattr(self._of.trouble, "torn", 0.0)

    def _arm_hung(self, _rng: random.Random, namespace: str) -> Callable[[], None]:
        hung = self._of.trouble.hung_namespaces
        hung.append(namespace)
        return lambda: hung.remove(namespace)

    def _arm_broken(self, _rng: random.Random, namespace: str) -> Callable[[], None]:
        broken = self._of.broken_arms
        broken.append(namespace)
        return lambda: broken.remove(namespace)

    def _no_threads(self, _rng: random.Random, number: int, namespace: str) -> Callable[[], None]:
        threadless, of = self._of.threadless, (self._of.replicas[number].host.name, namespace)
        threadless.append(of)
        return lambda: threadless.remove(of)

    def _model_slow(self, rng: random.Random) -> Callable[[], None]:
        self._of.models.slow_s = rng.choice([0.05, 0.5, 2.0, 5.0])
        return lambda: setattr(self._of.models, "slow_s", 0.0)

    def _model_fails(self, _rng: random.Random) -> Callable[[], None]:
        self._of.models.is_failing = True
        return lambda: setattr(self._of.models, "is_failing", False)

    def _model_broken(self, _rng: random.Random) -> Callable[[], None]:
        self._of.models.is_broken = True
        return lambda: setattr(self._of.models, "is_broken", False)

    def _bytes_torn(self, _rng: random.Random) -> Callable[[], None]:
        self._of.wires.torn = 0.5
        return lambda: setattr(self._of.wires, "torn", 0.0)

    def link(self, number: int) -> Link:
        """Return a replica's link to Redis."""
        return self._of.wires.link(self._of.replicas[number].host.name, REDIS_PORT)


def _is_redis(wire: Wire) -> bool:
    return isinstance(wire.get_protocol(), Session)


def _do_nothing() -> None:
    """Do nothing: the fault ends by itself."""
