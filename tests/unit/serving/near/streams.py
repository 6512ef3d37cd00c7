"""Streams of inputs for near-match reuse over the real index and policy, with a known truth for each answer.

Texts stand for their vectors: paraphrases lie close to a text, labels change at boundaries. Histories are of items
whose vectors a tower averages; near-duplicates differ by one item.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray

from cache.model.candidate_search import ListSearch, Searcher
from cache.model.input_preparation import PreparedInput
from serving.near.near_matches import ListMatches, NearOutcome, Neighbours, ValueMatches
from serving.near.reuse_policy import ReusePolicy

ERROR = 0.01
BATCH = 128
Numbers = NDArray[np.float32]
NO_ORDINALS = np.empty(0, np.int64)


class Texts(NamedTuple):
    """Inputs by their vectors, and the model's values for them."""

    vectors: Numbers
    values: Numbers


Draw = Callable[[np.random.Generator, int], Texts]


def unit(vectors: NDArray[Any]) -> Numbers:
    """Return the rows scaled to length 1."""
    rows: Numbers = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return rows


def paraphrases(seed: int, *, dims: int = 32, bases: int = 400, labels: int = 4) -> Draw:
    """Half of the texts are new, half paraphrase one of a few hundred, closely or not; labels are linear."""
    rng = np.random.default_rng([seed, 1])
    base_vectors = unit(rng.standard_normal((bases, dims)))
    weights = rng.standard_normal((dims, labels)).astype(np.float32)
    widths = np.array([0.25, 0.5, 1, 2, 4]) * 0.05 / dims**0.5

    def draw(rng: np.random.Generator, count: int) -> Texts:
        noise = rng.standard_normal((count, dims))
        near = base_vectors[rng.integers(0, bases, count)] + rng.choice(widths, count)[:, None] * noise
        is_near = rng.random(count) < 0.5
        vectors = unit(np.where(is_near[:, None], near, noise))
        return Texts(vectors, vectors @ weights)

    return draw


def opposites(honest: Draw) -> Draw:
    """Every input comes twice, very close together, with opposite labels and equal certainty."""

    def draw(rng: np.random.Generator, count: int) -> Texts:
        vectors = honest(rng, count).vectors
        vectors[1::2] = vectors[::2] + np.float32(1e-4) * vectors[1::2]
        is_odd = np.arange(count) % 2 == 1
        return Texts(vectors, np.stack([is_odd, ~is_odd], 1).astype(np.float32) * 9)

    return draw


def turning(honest: Draw, after: int) -> Draw:
    """Paraphrases keep their labels for so many inputs; after that, each has another label than before."""
    drawn = 0

    def draw(rng: np.random.Generator, count: int) -> Texts:
        nonlocal drawn
        drawn += count
        texts = honest(rng, count)
        values = np.roll(texts.values, 1, axis=1) if drawn > after else texts.values
        return Texts(texts.vectors, values)

    return draw


@dataclass
class RunCounts:
    """Counts of a run after each batch: answers given, reused and wrong, and whether any was reused."""

    policy: ReusePolicy
    counts: Counter[NearOutcome]
    answers: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    is_reusing: list[bool] = field(default_factory=list)

    def add(self, answers: int, reused: int, wrong: int) -> None:
        """Add a batch."""
        for sums, more in ((self.answers, answers), (self.reused, reused), (self.wrong, wrong)):
            sums.append((sums[-1] if sums else 0) + more)
        self.is_reusing.append(self.policy.is_reusing)

    @property
    def error(self) -> float:
        """Share of the reused answers that were wrong."""
        return self.wrong[-1] / max(1, self.reused[-1])

    @property
    def reused_share(self) -> float:
        """Share of the answers that were reused, or proven equal to the live ones."""
        return (self.reused[-1] + self.counts["proven"]) / self.answers[-1]


class TextModel:
    """Predictor that gives each text its drawn values."""

    def __init__(self) -> None:
        self.now = Texts(np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))

    def sent_vectors(self, _table: str, batch: Sequence[int]) -> Numbers:
        """Vectors of the texts."""
        return self.now.vectors[batch]

    def vectors(self, batch: Sequence[int]) -> Numbers:
        """Values, which are the model's output."""
        return self.now.values[batch]

    def numbers(self, _table: str, outputs: Numbers, *_: object) -> list[int]:
        """First labels in place of records."""
        return list(outputs.argmax(axis=1).tolist())


def run_texts(draw: Draw, inputs: int, seed: int, *, entries: int = 1_024) -> RunCounts:
    """Run so many texts through the matches of a value table."""
    rng, model, counts = np.random.default_rng([seed, 2]), TextModel(), Counter[NearOutcome]()
    dims = draw(np.random.default_rng(0), 2).vectors.shape[1]
    neighbours: Neighbours[Numbers] = Neighbours(ERROR, entries, dims, Random(seed), counts)
    matches = ValueMatches("t", neighbours)
    run_counts = RunCounts(neighbours.policy, counts)
    for _ in range(0, inputs, BATCH):
        model.now = draw(rng, BATCH)
        rows: Any = range(BATCH)
        labels, distances = matches.predict(model, rows, rows, 0, NO_ORDINALS, 0)  # type: ignore[arg-type]
        true = model.now.values.argmax(axis=1).tolist()
        reused = [row for row, distance in enumerate(distances) if distance is not None]
        assert all(labels[row] == true[row] for row in rows if distances[row] is None)
        run_counts.add(BATCH, len(reused), sum(labels[row] != true[row] for row in reused))
    return run_counts


class HistoryModel:
    """Predictor of lists: the mean of a history's item vectors, over clustered items and a real flat index."""

    ITEMS, DIMS, CLUSTERS, K = 400, 16, 20, 10

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 3])
        self.clusters = rng.integers(0, self.CLUSTERS, self.ITEMS)
        centres = rng.standard_normal((self.CLUSTERS, self.DIMS))
        noise = rng.standard_normal((self.ITEMS, self.DIMS))
        self.items = (centres[self.clusters] + 0.7 * noise).astype(np.float32)
        index = faiss.IndexFlatIP(self.DIMS)
        index.add(self.items)
        table: Any = SimpleNamespace(vectors=self.items, count=self.ITEMS)
        self._search = ListSearch(Searcher(index, "inner_product", 1), table, self.K)
        self.best: NDArray[np.uint32] = np.empty((0, 0), np.uint32)

    def vectors(self, batch: Sequence[PreparedInput]) -> Numbers:
        """Return the means of the histories, which all have one length."""
        means: Numbers = self.items[np.stack([prepared.history for prepared in batch])].mean(axis=1)
        return means

    def search(self, _table: str) -> ListSearch:
        """Search for lists."""
        return self._search

    def lists(self, _table: str, ranked: tuple[Any, Any], *_: object) -> list[bytes]:
        """Keeps the lists in place of records."""
        self.best = ranked[0]
        return [b""] * len(ranked[0])

    def true_lists(self, batch: Sequence[PreparedInput]) -> NDArray[np.uint32]:
        """Return the lists that the live model would give."""
        vectors = self.vectors(batch)
        return self._search.lists(batch, vectors, NO_ORDINALS)[0]


def histories(model: HistoryModel, rng: np.random.Generator, length: int = 12) -> Iterator[list[PreparedInput]]:
    """Yield batches of histories: half new, from two clusters each, half a recent new one with another item."""
    recent = np.empty((0, length), np.int64)
    order = np.argsort(model.clusters, kind="stable")
    starts = np.searchsorted(model.clusters[order], np.arange(model.CLUSTERS + 1))
    while True:
        clusters = rng.integers(0, model.CLUSTERS, (BATCH, 2))[:, rng.integers(0, 2, length)]
        low, high = starts[clusters], starts[clusters + 1]
        drawn = order[low + (rng.random((BATCH, length)) * np.maximum(high - low, 1)).astype(int)]
        if len(recent):
            near = rng.random(BATCH) < 0.5
            near_duplicates = recent[rng.integers(0, len(recent), BATCH)].copy()
            near_duplicates[np.arange(BATCH), rng.integers(0, length, BATCH)] = rng.integers(0, model.ITEMS, BATCH)
            drawn[near] = near_duplicates[near]
            recent = np.concatenate([recent, drawn[~near]])[-500:]
        else:
            recent = drawn
        yield [PreparedInput("t", history, {}, -1, np.unique(history), 0) for history in drawn]


def run_histories(inputs: int, seed: int, *, entries: int = 1_024, is_exact: bool = False) -> RunCounts:
    """Run so many histories through the matches of a table of lists, whose index counts as exact or not."""
    model, counts = HistoryModel(seed), Counter[NearOutcome]()
    neighbours: Any = Neighbours(ERROR, entries, model.DIMS, Random(seed), counts)
    reach = model.search("t").score_change_max() if is_exact else None
    matches = ListMatches("t", model.K, 0.9, reach, neighbours)
    run_counts = RunCounts(neighbours.policy, counts)
    batches = histories(model, np.random.default_rng([seed, 4]))
    for _ in range(0, inputs, BATCH):
        batch = next(batches)
        _, distances = matches.predict(model, batch, range(BATCH), 0, NO_ORDINALS, 0)  # type: ignore[arg-type]
        reused = [row for row, distance in enumerate(distances) if distance is not None]
        wrong = 0
        if is_exact:  # what is not marked is live's own list, proven or computed
            unmarked_rows = [row for row, distance in enumerate(distances) if distance is None]
            true = model.true_lists([batch[row] for row in unmarked_rows])
            assert np.array_equal(model.best[unmarked_rows], true)
        if reused:
            true = model.true_lists([batch[row] for row in reused])
            pairs = zip(model.best[reused], true, strict=True)
            wrong = sum(len(np.intersect1d(*pair)) < 0.9 * model.K for pair in pairs)
        run_counts.add(BATCH, len(reused), wrong)
    return run_counts
