"""The library that LoadGen draws from: users by Zipf 1.0, and 5 % strangers with histories."""

import json
import random
from pathlib import Path

import numpy as np

from tests.bench.read_path import TABLE, Case
from tests.bench.tools.mix import UNKNOWN, path_of
from tests.bench.tools.sockets import request

K = 20
PATH = f"/v1/lookup/{TABLE}"
_NUMBER = "000000000000"
"""Place of a stranger's number, which the driver puts in: who is new never comes again."""


def write_samples(case: Case, path: Path, count: int, *, seed: int = 0) -> float:
    """Writes so many samples, one JSON object a line, and returns the share of strangers.

    LoadGen draws them with equal chances, so the draw of users by Zipf is made here.
    """
    rng = np.random.default_rng(seed)
    users = random.Random(seed).sample(case.users, len(case.users))
    weights = 1 / np.arange(1, len(users) + 1)
    drawn = rng.choice(len(users), count, p=weights / weights.sum()).tolist()
    is_new = rng.random(count) < UNKNOWN
    items = np.array(case.items)
    with path.open("w") as lines:
        for at, new in zip(drawn, is_new.tolist(), strict=True):
            if not new:
                sample = {"request": [request(path_of(users[at])).decode()], "entity": [json.dumps(users[at])]}
            else:
                history = rng.choice(items, int(rng.integers(5, 31)), replace=False).tolist()
                entity = json.dumps({"id": f"stranger-{_NUMBER}", "history": history})
                body = json.dumps({"entities": [json.loads(entity)], "k": K}).encode()
                sample = {"request": request(PATH, body).decode().split(_NUMBER), "entity": entity.split(_NUMBER)}
            lines.write(json.dumps(sample) + "\n")
    return float(is_new.mean())
