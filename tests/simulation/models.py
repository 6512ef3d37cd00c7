"""The live models of all hosts: their faults, and what they are computing."""

from collections.abc import Callable

from tests.simulation.nights import Model
from tests.simulation.threads import TAKES_S, Threads
from tests.simulation.virtual_loop import HOST, Host

LEASE_S = 0.1
"""Seconds within which a second process finds that the first one computes."""

Input = tuple[int, int, tuple[int, ...]]
"""Night, fingerprint of the id, and the history by ordinal."""


class TwiceAtOnce(AssertionError):
    """One process, or two that could coordinate, computed the same answer at the same time."""


class Models:
    """Records every inference, in the thread that makes it."""

    def __init__(self, threads: Threads) -> None:
        self.slow_s = 0.0
        self.is_failing = False
        self.is_broken = False
        """True if no model opens."""
        self.twice: list[str] = []
        self.can_talk: Callable[[int], bool] = lambda _fingerprint: False
        """True if processes have been able to tell each other that they compute for this entity."""
        self._threads = threads
        self._under_way: dict[Input, dict[Host, float]] = {}

    def open(self, number: int) -> Model | None:
        """Return a night's model, None while models cannot be opened."""
        return None if self.is_broken else Model(number, self.compute)

    def compute(self, inputs: list[Input]) -> None:
        """Take the model's time, and fail if the model has a fault."""
        host, now_s = HOST.get(), self._threads.loop.time()
        assert host is not None
        for model_input in inputs:
            began_at_by_host = self._under_way.setdefault(model_input, {})
            if host in began_at_by_host:
                self.twice.append(f"{host.name} computes {model_input} twice at once")
            elif any(
                not other_host.is_dead and now_s - began_at < LEASE_S and self.can_talk(model_input[1])
                for other_host, began_at in began_at_by_host.items()
            ):
                self.twice.append(f"{host.name} computes {model_input} while another one does: {began_at_by_host}")
            began_at_by_host[host] = now_s
        try:
            self._threads.sleep(self._threads.rng.random() * TAKES_S + self.slow_s)
            if self.is_failing:
                raise RuntimeError("the model fails")
        finally:
            for model_input in inputs:
                self._under_way[model_input].pop(host, None)
