"""What happens in a simulation, drawn from its seed: every step with its moment and its own chances.

Steps are independent of each other, so that any of them can be left out and the rest still means something.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.callers import Call, Question
from tests.simulation.nights import ARMS, ITEMS, OWN_NAMESPACE, STRANGERS, USERS, generation_of

REPLICAS = 2
POPULAR_USERS = USERS[1:4]
"""Users who are asked for most."""
STEPS = 44

WEIGHTS = {
    "ask": 60, "burst": 8, "crowd": 5, "night": 10, "bad night": 1, "roll_back": 4, "canary": 3, "end_canary": 3,
    "retire": 4, "restore": 2, "block": 4, "unblock": 2, "erase": 1,
    "save": 2, "redis older": 1, "redis down": 3, "redis wiped": 1, "redis held": 3, "redis slow": 2, "link held": 2,
    "cut": 3, "store hung": 2, "store failing": 2, "store torn": 2, "kill": 3, "restart": 2, "clock": 2,
    "model slow": 2, "model fails": 2, "model broken": 1, "bytes torn": 2, "stall": 2,
}  # fmt: skip
"""What happens, by how often."""

EXPERIMENTS = {
    "experiment": 10, "stop experiment": 6, "change share": 3, "arm night": 3,
    "arm hung": 2, "arm broken": 2, "no threads": 2,
}  # fmt: skip
"""What happens beside it where experiments are made."""
EXPERIMENTS_SHARE = 0.25
"""Share of the seeds under which they are."""


@dataclass(frozen=True, slots=True)
class Step:
    """An event at `at` seconds; `seed` decides its random details."""

    at: float
    kind: str
    arguments: tuple[Any, ...] = ()
    seed: int = 0
    calls: tuple[Call, ...] = field(default=())

    def __str__(self) -> str:
        calls = f" {len(self.calls)} calls, first {self.calls[0]}" if self.calls else ""
        return f"{self.at:8.3f} {self.kind} {self.arguments or ''}{calls}"


@dataclass(frozen=True, slots=True)
class Bias:
    """Events that happen more or less often than usual, to find rare failures."""

    weights: dict[str, int] = field(default_factory=dict)
    steps: int = STEPS


def scenario(seed: int, bias: Bias = Bias()) -> list[Step]:
    """Return the steps of that seed, in order of time."""
    rng = random.Random(f"{seed} scenario")
    has_experiments = random.Random(f"{seed} experiments").random() < EXPERIMENTS_SHARE
    weights = {**WEIGHTS, **(EXPERIMENTS if has_experiments else {}), **bias.weights}
    steps = [Step(0.0, "night", (), rng.getrandbits(32))]
    if weights.get("experiment"):
        steps += [Step(0.1, "arm night", (arm,), rng.getrandbits(32)) for arm in ARMS]
        steps.append(_step(1.0, "experiment", rng))
    at = 1.0
    for _ in range(bias.steps):
        # Let events happen close together, or long after one another.
        luck = rng.random()
        at += rng.choice([0.0, 0.002, 0.02]) if luck < 0.4 else rng.expovariate(1 / 0.5)
        at += rng.uniform(1.0, 30.0) if luck > 0.8 else 0.0
        kind = rng.choices(list(weights), list(weights.values()))[0]
        steps.append(_step(at, kind, rng))
    return steps


def _step(at: float, kind: str, rng: random.Random) -> Step:
    arguments: tuple[Any, ...] = ()
    calls: tuple[Call, ...] = ()
    long_s = rng.choice([0.05, 0.3, 1.0, 3.0, 8.0, 20.0])
    match kind:
        case "ask":
            calls = (_call(rng),)
        case "burst":
            replica, users = rng.randrange(REPLICAS), rng.choices([*USERS, *STRANGERS[:2]], k=12)
            calls = tuple(Call(replica, (Question(user),)) for user in users)
        case "crowd":
            question = Question(rng.choice(STRANGERS[:3]), (rng.choice(ITEMS[:6]),))
            calls = tuple(
                Call(caller_number % REPLICAS, (question,), 4_000, is_post=True) for caller_number in range(4)
            )
        case "canary":
            arguments = (rng.choice([10.0, 50.0]),)
        case "end_canary":
            arguments = (rng.random() < 0.5,)
        case "block" | "unblock":
            item, user = rng.choice(ITEMS), rng.choice([*USERS, *STRANGERS])
            arguments = (item, None) if rng.random() < 0.6 else (None, user)
        case "erase":
            arguments = (None, None, rng.choice(USERS))
            kind = "block"
        case "link held" | "cut" | "kill" | "restart":
            arguments = (rng.randrange(REPLICAS), long_s)
        case "clock":
            arguments = (rng.randrange(REPLICAS), rng.choice([-3_600.0, -1.5, 0.7, 3_600.0]))
        case "stall":
            arguments = (rng.choice([0.01, 0.1, 0.4]),)
        case "store hung":
            arguments = (rng.choice([None, *range(REPLICAS)]), rng.choice([long_s, 30.0]))
        case "experiment":
            arms = rng.choice([ARMS[:1], ARMS[1:], ARMS])
            arguments = (arms, rng.choice([0.2, 0.4, 0.6]))
        case "change share":
            arguments = (rng.randrange(4), rng.choice([0.1, 0.4, 0.8]), rng.choice([None, 0.2, 0.7]))
        case "stop experiment":
            arguments = (rng.randrange(4),)
        case "arm night":
            arguments = (rng.choice(ARMS),)
        case "arm hung" | "arm broken":
            arguments = (rng.choice(ARMS), rng.choice([1.0, 20.0, 45.0]))
        case "no threads":
            arguments = (rng.randrange(REPLICAS), rng.choice([OWN_NAMESPACE, *ARMS]), rng.choice([1.0, 30.0]))
        case _ if " " in kind and kind != "bad night":
            arguments = (long_s,)
    return Step(round(at, 4), kind, arguments, rng.getrandbits(32), calls)


def _call(rng: random.Random) -> Call:
    """Return a request, plain in half of the cases."""
    replica, luck = rng.randrange(REPLICAS), rng.random()
    user = rng.choice([*USERS, *POPULAR_USERS * 8, *STRANGERS[:3] * 4])
    if luck < 0.5:
        return Call(replica, (Question(user),), rng.choice([30, 100, 600, 600]), rng.choice([None, None, None, 3]))
    questions = tuple(
        Question(
            rng.choice([*USERS, *POPULAR_USERS * 4, *STRANGERS[:3] * 2]),
            tuple(rng.sample(ITEMS, rng.randint(1, 3))) if rng.random() < 0.5 and luck > 0.6 else (),
        )
        for _ in range(rng.choice([1, 1, 2, 5]))
    )
    return Call(
        replica, questions, rng.choice([60, 400, 1_000]), rng.choice([None, None, 3]),
        tuple(rng.sample(ITEMS, 2)) if rng.random() < 0.2 else (),
        fresh=rng.random() < 0.1,
        generation=generation_of(rng.randint(1, 5)) if rng.random() < 0.1 else None,
        is_post=True,
        leaves_after_s=rng.choice([0.002, 0.01, 0.05]) if rng.random() < 0.1 else None,
    )  # fmt: skip
