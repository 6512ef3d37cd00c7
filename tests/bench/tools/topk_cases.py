"""Users, items and histories for the top-K bench: a trained model's on real data, and Gaussian ones."""

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache.model.tower import Histories, Tower
from cache.process.host import usable_cores
from precompute.bundles.bundle import Bundle
from precompute.reference.matrix_factorisation import SpectralShape
from precompute.reference.train import ReferenceData, train

DATA = "LARDER_BENCH_DATA"
"""Names the folder that holds `gowalla/train.txt.gz` (one line per user: user item item ...)."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Users, items and what each user already has."""

    users: NDArray[np.float32]
    items: NDArray[np.float32]
    histories: Histories


NO_DATA = f"{DATA} names no folder with gowalla/train.txt.gz"


def real_file() -> Path | None:
    """The interactions, if the environment names them."""
    path = Path(os.environ.get(DATA, ""), "gowalla/train.txt.gz")
    return path if DATA in os.environ and path.exists() else None


def real_case(file: Path, folder: Path, users: int, dims: int, *, seed: int = 0) -> Case:
    """The reference model trained on the interactions; `users` drawn at random with their histories."""
    with gzip.open(file, "rt") as lines:
        rows = [np.array(line.split()[1:], np.int64) for line in lines]
    histories = Histories.of(rows)
    owners = np.repeat(np.arange(len(rows)), np.diff(histories.indptr))
    names = [str(item_number) for item_number in range(int(histories.indices.max()) + 1)]
    bundle = train(ReferenceData(owners, histories.indices, names), folder, dims=dims, shape=SpectralShape())
    user_rows = np.random.default_rng(seed).permutation(len(rows))[:users]
    input_histories = histories.select_rows(np.sort(user_rows))
    return Case(
        _vectors(bundle, "history", input_histories),
        _vectors(bundle, "item_index", np.arange(len(names))),
        input_histories,
    )


def _vectors(bundle: Bundle, name: str, value: Histories | NDArray[np.int64]) -> NDArray[np.float32]:
    model = bundle.user_tower if name == "history" else bundle.item_tower
    tower = Tower.open(model.path, model.spec, threads=usable_cores())
    return tower.run({name: value})


def random_case(users: int, items: int, dims: int, *, seed: int = 0) -> Case:
    """Gaussian vectors, where no bound can save anything; histories of 8 to 800 items."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(8 * rng.pareto(1.6, users) + 8, 8, 800).astype(np.int64)
    histories = Histories.of([rng.choice(items, count, replace=False) for count in lengths])
    return Case(
        rng.standard_normal((users, dims), np.float32), rng.standard_normal((items, dims), np.float32), histories
    )
