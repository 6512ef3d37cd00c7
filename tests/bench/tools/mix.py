"""The mixed stream: known users drawn by Zipf 1.0, and 5 % who are new and bring a history."""

import json
import random
from dataclasses import dataclass, field
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from tests.bench.read_path import TABLE, Case
from tests.bench.tools.open_loop import Arrivals
from tests.bench.tools.sockets import request

DEADLINE_S = 0.3
UNKNOWN = 0.05
IN_FLIGHT = 64
CONNECTIONS = 2_048


@dataclass(slots=True)
class Stream:
    """Requests in the mix; who is new never comes again."""

    case: Case
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    strangers: int = 0
    items: NDArray[np.str_] = field(init=False)
    known_requests: list[bytes] = field(init=False)
    probabilities: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.items = np.array(self.case.items)
        users = random.Random(0).sample(self.case.users, len(self.case.users))
        self.known_requests = [request(path_of(user)) for user in users]
        weights = 1 / np.arange(1, len(users) + 1)
        self.probabilities = weights / weights.sum()

    def draw(self, count: int) -> tuple[list[bytes], NDArray[np.int64]]:
        """Return requests, and the order in which they are sent."""
        request_indexes = self.rng.choice(len(self.known_requests), count, p=self.probabilities)
        new = np.flatnonzero(self.rng.random(count) < UNKNOWN)
        request_indexes[new] = len(self.known_requests) + np.arange(len(new))
        return self.known_requests + [self._stranger() for _ in range(len(new))], request_indexes

    def _stranger(self) -> bytes:
        self.strangers += 1
        history = self.rng.choice(self.items, int(self.rng.integers(5, 31)), replace=False)
        entity = {"id": f"stranger-{self.strangers}", "history": history.tolist()}
        body = json.dumps({"entities": [entity], "k": 20}).encode()
        return request(f"/v1/lookup/{TABLE}", body)

    def arrivals(self, url: str, *parts: tuple[float, float]) -> Arrivals:
        """Poisson arrivals: (rate, seconds) after (rate, seconds)."""
        due, phase_start_s = [], 0.0
        for rate, seconds in parts:
            gaps = self.rng.exponential(1 / rate, int(rate * seconds * 1.1) + 50)
            times = phase_start_s + np.cumsum(gaps)
            due.append(times[times < phase_start_s + seconds])
            phase_start_s += seconds
        moments = np.concatenate(due)
        requests, request_indexes = self.draw(len(moments))
        return Arrivals(url, requests, request_indexes, moments, CONNECTIONS, DEADLINE_S)

    def all_known(self, url: str) -> Arrivals:
        """Each known user twice: after it all of them are ready in L1."""
        request_indexes = np.tile(np.arange(len(self.known_requests)), 2)
        return Arrivals(url, self.known_requests, request_indexes, np.zeros(len(request_indexes)), IN_FLIGHT)

    def closed(self, url: str, count: int) -> Arrivals:
        """Return arrivals that are all due at once, so that a closed loop sends them as fast as it can."""
        requests, request_indexes = self.draw(count)
        return Arrivals(url, requests, request_indexes, np.zeros(count), IN_FLIGHT)


def path_of(user: str) -> str:
    """Return the path of an L1 hit of the hot route."""
    return f"/v1/lookup/{TABLE}/{quote(user, safe='')}?k=20"
