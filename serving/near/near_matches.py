"""Near matches: answers of live inference reused for near inputs, with their neighbours and metrics."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from threading import Lock
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import faiss as faiss_module
import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.config.serving import NearConfig
from cache.model.candidate_search import ListSearch
from cache.model.input_preparation import LiveInput, PreparedInput
from cache.model.predictor import Predictor
from cache.records import NO_ITEM
from serving.engine.micro_batcher import ComputedRecord, InferenceJob
from serving.generations.snapshot import Snapshot
from serving.near.reuse_policy import Decision, ReusePolicy

log = logging.getLogger(__name__)

faiss: Any = faiss_module  # its type stubs lag behind what the module has

_QUERIES_PER_CALL = 16
"""Queries per FAISS call: more would select another kernel, and another library for the sums."""

CLOSENESS_RANGES = 12
"""Ranges of closeness, by which a policy learns: 0 is the farthest, each is half as wide as the one before."""

FARTHEST_DISTANCE = 0.5
"""Distance, in lengths of the vector, from which on no answer is near."""

_MARGIN_MIN = 1e-30

SEARCH_DEPTH = 2
"""Candidates kept of a search, in lengths of a list: with more, a farther input's best items are still among them."""

SEARCH_DEPTH_MAX = 512

_ULP = 2.0**-23

Entry = TypeVar("Entry")

Answer = TypeVar("Answer")

Ordinals = NDArray[np.int64]

Vectors = NDArray[np.float32]

Numbers = NDArray[np.float32]

InputKind = Literal["history", "features", "both"]

NearOutcome = Decision | Literal["far", "proven"]
"""Outcome of an input: no recent answer is near, one is proven to be its own, or the policy's decision."""

JUDGED_OUTCOMES: tuple[NearOutcome, ...] = ("learn", "audit")


class Nearest(NamedTuple, Generic[Entry]):
    """Nearest of the recent vectors: its slot, its entry, and the distance in lengths of the query."""

    slot: int
    entry: Entry
    distance: float


class RecentVectors(Generic[Entry]):
    """Index of the `capacity` vectors float32 [dims] that were added or used last; not thread-safe.

    A scan of them all: at 4,096 x 128 it takes some 60 us, a hundredth of a search among a hundred times as many items.
    """

    def __init__(self, capacity: int, dims: int) -> None:
        self._capacity = capacity
        self._dims = dims
        self._index = faiss.IndexFlatL2(dims)
        self._rows: NDArray[np.float32] | None = None
        self._entries: list[Entry] = []
        self._used = np.zeros(capacity, np.int64)
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def nearest(self, queries: NDArray[np.float32]) -> list[Nearest[Entry] | None]:
        """Return the nearest vector of each query [n, dims]; None for a zero query, or an empty index."""
        if not self._entries:
            return [None] * len(queries)
        faiss.omp_set_num_threads(1)
        nearest_entries: list[Nearest[Entry] | None] = []
        lengths = np.sqrt(np.einsum("nd,nd->n", queries, queries)).tolist()
        for start in range(0, len(queries), _QUERIES_PER_CALL):
            part = np.ascontiguousarray(queries[start : start + _QUERIES_PER_CALL], np.float32)
            squares, slots = self._index.search(part, 1)
            pairs = zip(squares[:, 0].tolist(), slots[:, 0].tolist(), strict=True)
            for length, (square, slot) in zip(lengths[start:], pairs, strict=False):
                usable = length > 0 and slot >= 0
                distance = square**0.5 / length if usable else 0.0
                nearest_entries.append(
                    Nearest(slot, self._entries[slot], distance) if usable else None
                )
        return nearest_entries

    def mark_used(self, slot: int) -> None:
        """Mark the entry as used: the least recently used one is replaced first."""
        self._tick += 1
        self._used[slot] = self._tick

    def add(self, vector: NDArray[np.float32], entry: Entry) -> None:
        """Add a vector with its entry; a full index replaces the least recently used one."""
        slot = len(self._entries)
        if slot < self._capacity:
            self._index.add(vector[None])
            self._entries.append(entry)
        else:
            if self._rows is None:  # FAISS' own memory, which grows no more
                flat = faiss.rev_swig_ptr(self._index.get_xb(), self._capacity * self._dims)
                self._rows = flat.reshape(self._capacity, self._dims)
            slot = int(self._used.argmin())
            self._rows[slot] = vector
            self._entries[slot] = entry
        self.mark_used(slot)

    def clear(self) -> None:
        """Remove all vectors."""
        self._index = faiss.IndexFlatL2(self._dims)
        self._rows = None
        self._entries.clear()
        self._used[:] = 0


@dataclass(slots=True, eq=False)
class KeptAnswer(Generic[Answer]):
    """Recent answer, its margin, and the least distance at which it proved wrong."""

    answer: Answer
    margin: float
    limit: float


class NearAnswer(NamedTuple, Generic[Answer]):
    """Recent answer near an input: its slot, and the distance in lengths of the input's vector.

    `closeness` is the range by which the policy knows it.
    """

    kept_answer: KeptAnswer[Answer]
    distance: float
    slot: int
    closeness: int

    @property
    def answer(self) -> Answer:
        """Answer itself."""
        return self.kept_answer.answer


class Neighbours(Generic[Answer]):
    """Recent answers of one table, generation and kind of input; thread-safe."""

    def __init__(
        self, error: float, entries: int, dims: int, rng: Random, counts: Counter[NearOutcome]
    ) -> None:
        self.policy = ReusePolicy(error, CLOSENESS_RANGES, rng)
        self._vectors: RecentVectors[KeptAnswer[Answer]] = RecentVectors(entries, dims)
        self._counts = counts
        self._version = 0
        self._lock = Lock()

    def near(
        self, vectors: NDArray[np.float32], version: int = 0
    ) -> list[NearAnswer[Answer] | None]:
        """Return the nearest recent answer of each vector [n, dims]; None if none is near, or it proved wrong at less.

        A later version of the common exclusions forgets the answers before it; an earlier one finds nothing.
        """
        with self._lock:
            if version > self._version:
                self._version = version
                self._vectors.clear()
            if version < self._version:
                return [None] * len(vectors)
            nearest_entries = self._vectors.nearest(vectors)
        return [None if nearest is None else _near_answer(nearest) for nearest in nearest_entries]

    def may_use(self, near: NearAnswer[Answer]) -> bool:
        """True unless the policy rejects such answers in any case."""
        with self._lock:
            return self.policy.may_use(near.closeness)

    def decide(self, near: NearAnswer[Answer]) -> Decision:
        """Return the policy's decision about a near answer."""
        with self._lock:
            self._vectors.mark_used(near.slot)
            return self.policy.decide(near.closeness)

    def settle(
        self,
        vector: NDArray[np.float32],
        answer: Answer,
        near: NearAnswer[Answer] | None,
        outcome: NearOutcome,
        *,
        wrong: bool,
        margin: float = 1.0,
        version: int = 0,
    ) -> None:
        """Judge the near answer by a computed one; store that unless the near one is right for both.

        The smaller its `margin`, the sooner another answer is right for a near input.
        """
        limit = math.inf
        with self._lock:
            if near is not None and outcome in JUDGED_OUTCOMES:
                self.policy.judge(near.closeness, is_audit=outcome == "audit", wrong=wrong)
                if not wrong:
                    return
                limit = near.distance
                near.kept_answer.limit = min(near.kept_answer.limit, limit)
            # A vector of no length, or what is made of numbers that are none, has no neighbours.
            is_sound = (
                0 < float(np.abs(vector).max(initial=0)) < math.inf and 0 <= margin < math.inf
            )
            if is_sound and version == self._version:
                self._vectors.add(vector, KeptAnswer(answer, margin, limit))

    def count(self, outcomes: Sequence[NearOutcome]) -> None:
        """Count inputs by outcome."""
        with self._lock:
            self._counts.update(outcomes)


def _near_answer(nearest: Nearest[KeptAnswer[Answer]]) -> NearAnswer[Answer] | None:
    kept_answer, distance = nearest.entry, nearest.distance
    if not distance < min(FARTHEST_DISTANCE, kept_answer.limit):
        return None
    return NearAnswer(
        kept_answer, distance, nearest.slot, closeness_range(distance, kept_answer.margin)
    )


def closeness_range(distance: float, margin: float) -> int:
    """Return the number of the closeness range of a distance divided by the answer's margin.

    How likely an answer changes goes by how far away it is and how far it is from changing, not by distance alone.
    """
    if distance <= 0:
        return CLOSENESS_RANGES - 1
    halving_count = int(math.log2(max(margin, _MARGIN_MIN) * FARTHEST_DISTANCE / distance))
    return min(max(halving_count, 0), CLOSENESS_RANGES - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Candidates of one search, best first, padded with -1; no other item scores above `beyond`.

    Scores are those in the direction of its vector; `beyond` is infinite where the index is not exact.
    """

    ordinals: NDArray[np.int32]
    beyond: float


class ListMatches:
    """Near matches of one top-K table for one kind of input.

    Only the search is skipped: exclusions, scores and order are those of any live answer. An item is missed only if
    the neighbour's search did not reach it; an answer is wrong if it has less than `overlap` of the list that live
    would give.

    `reach`, where the index is exact, is the most that a score can change over a distance of one. No item beyond the
    candidates then scores above `beyond` + distance x reach (Cauchy-Schwarz): a list whose last item does is the live
    answer itself, whatever the policy says.
    """

    def __init__(
        self,
        table: str,
        width: int,
        overlap: float,
        reach: float | None,
        neighbours: Neighbours[Candidates],
    ) -> None:
        self.neighbours = neighbours
        self._table = table
        self._width = width
        self._overlap = overlap
        self._reach = reach

    def predict(
        self,
        predictor: Predictor,
        batch: Sequence[PreparedInput],
        fingerprints: Sequence[int],
        scored_at: int,
        blocked: Ordinals,
        version: int,
    ) -> tuple[list[bytes], list[float | None]]:
        """Return a record for each input, and the distance of the input whose candidates were reused, None if computed.

        `version` grows with each blocklist, whose ordinals are `blocked`.
        """
        neighbours, search = self.neighbours, predictor.search(self._table)
        vectors = predictor.vectors(batch)
        lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))[:, None]
        directions = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        excluded = search.excluded(batch, blocked)
        needed = search.counts(excluded)
        counts = needed.tolist()
        close = neighbours.near(directions, version)
        near = {
            row: near_answer
            for row, near_answer in enumerate(close)
            if near_answer is not None and self._is_worth(near_answer, counts[row])
        }
        outcomes: list[NearOutcome] = [
            "far" if near_answer is None else "leave" for near_answer in close
        ]
        ordinals = np.full((len(batch), self._width), NO_ITEM, np.uint32)
        scores = np.zeros((len(batch), self._width), np.float32)
        if rows := list(near):
            candidate_sets, row_exclusions = (
                [near[row].answer for row in rows],
                [excluded[row] for row in rows],
            )
            candidates = [
                candidate_set.ordinals.astype(np.int64) for candidate_set in candidate_sets
            ]
            ordinals[rows], scores[rows] = search.rank_candidates(
                vectors[rows], candidates, row_exclusions
            )
            distances = np.array([near[row].distance for row in rows])
            proven = self._proven(
                search, directions[rows], ordinals[rows, -1], candidate_sets, distances
            )
            for row, is_proven in zip(rows, proven, strict=True):
                outcomes[row] = "proven" if is_proven else neighbours.decide(near[row])
        if rows := [
            row
            for row, row_outcome in enumerate(outcomes)
            if row_outcome not in ("proven", "reuse")
        ]:
            depth = min(SEARCH_DEPTH * self._width, SEARCH_DEPTH_MAX, search.searcher.depth_max)
            deep = search.candidates(vectors[rows], np.maximum(needed[rows], depth), blocked)
            needed_candidates = [
                deep_ordinals[: counts[row]] for row, deep_ordinals in zip(rows, deep, strict=True)
            ]
            best_lists = search.rank_candidates(
                vectors[rows], needed_candidates, [excluded[row] for row in rows]
            )
            searched_candidate_sets = self._to_candidates(search, directions[rows], deep)
            for row, answer, items in zip(
                rows, searched_candidate_sets, best_lists[0], strict=True
            ):
                is_judged = outcomes[row] in JUDGED_OUTCOMES
                wrong = is_judged and _list_overlap(ordinals[row], items) < self._overlap
                neighbours.settle(
                    directions[row], answer, near.get(row), outcomes[row],
                    wrong=wrong, version=version,
                )  # fmt: skip
            ordinals[rows], scores[rows] = best_lists
        neighbours.count(outcomes)
        reused = [
            round(near[row].distance, 6) if outcome == "reuse" else None
            for row, outcome in enumerate(outcomes)
        ]
        return predictor.lists(self._table, (ordinals, scores), fingerprints, scored_at), reused

    def _is_worth(self, near: NearAnswer[Candidates], count: int) -> bool:
        """True if the near candidates are enough for a list and may be reused."""
        may_use = self._reach is not None or self.neighbours.may_use(near)
        return may_use and len(near.answer.ordinals) >= count

    def _proven(
        self,
        search: ListSearch,
        directions: Vectors,
        last: NDArray[np.uint32],
        candidate_sets: Sequence[Candidates],
        distances: NDArray[np.float64],
    ) -> list[bool]:
        """Return whether each list, whose last item is `last`, is proven: no item beyond its candidates fits in."""
        if self._reach is None:
            return [False] * len(candidate_sets)
        is_full = last != NO_ITEM
        beyond = np.array([candidate_set.beyond for candidate_set in candidate_sets])
        last_scores = search.scores(directions, np.where(is_full, last, 0).astype(np.int64))
        rounding = 4 * directions.shape[1] * _ULP  # of four sums of so many products
        is_above = last_scores > beyond + (distances + rounding) * self._reach
        proven: list[bool] = (np.isneginf(beyond) | (is_full & is_above)).tolist()
        return proven

    def _to_candidates(
        self, search: ListSearch, directions: Vectors, searched_ordinals: Sequence[Ordinals]
    ) -> list[Candidates]:
        """Copy the searched ordinals to candidates, so that they do not keep their batch alive."""
        beyond = np.full(len(searched_ordinals), math.inf)
        if self._reach is not None:
            last = np.array([row_ordinals[-1] for row_ordinals in searched_ordinals])
            is_all = (last < 0) | (
                np.array([len(row_ordinals) for row_ordinals in searched_ordinals])
                == search.items.count
            )
            scores = search.scores(directions, np.maximum(last, 0))
            beyond = np.where(is_all, -math.inf, scores.astype(np.float64))
        return [
            Candidates(row_ordinals.astype(np.int32), score_bound)
            for row_ordinals, score_bound in zip(searched_ordinals, beyond.tolist(), strict=True)
        ]


def _list_overlap(reused_items: NDArray[np.uint32], computed_items: NDArray[np.uint32]) -> float:
    """Return the share of the computed items that the reused list has; 1 if there are none."""
    of = set(computed_items.tolist()) - {NO_ITEM}
    return len(of.intersection(reused_items.tolist())) / len(of) if of else 1.0


class ValueMatches:
    """Near matches of one value table for one kind of input.

    Its model's output is the answer, so that there is no search to skip: inputs are compared by the numbers that were
    sent, and the model itself is skipped. An answer is wrong if its first label is another one.
    """

    def __init__(self, table: str, neighbours: Neighbours[Numbers]) -> None:
        self.neighbours = neighbours
        self._table = table

    def predict(
        self,
        predictor: Predictor,
        batch: Sequence[PreparedInput],
        fingerprints: Sequence[int],
        scored_at: int,
        blocked: NDArray[np.int64],  # noqa: ARG002 - no list, nothing to leave out
        version: int,  # noqa: ARG002
    ) -> tuple[list[bytes], list[float | None]]:
        """Return a record for each input, and the distance of the input whose values were reused, None if computed."""
        neighbours = self.neighbours
        sent_vectors = predictor.sent_vectors(self._table, batch)
        near = neighbours.near(sent_vectors)
        outcomes: list[NearOutcome] = [
            "far" if near_answer is None else neighbours.decide(near_answer) for near_answer in near
        ]
        rows = [row for row, outcome in enumerate(outcomes) if outcome != "reuse"]
        computed_values = (
            predictor.vectors([batch[row] for row in rows])
            if rows
            else np.empty((0, 0), np.float32)
        )
        values_by_row = dict(zip(rows, computed_values, strict=True))
        values: list[Numbers] = []
        distances: list[float | None] = []
        for row, (near_answer, outcome) in enumerate(zip(near, outcomes, strict=True)):
            if near_answer is not None and outcome == "reuse":
                values.append(near_answer.answer)
                distances.append(round(near_answer.distance, 6))
                continue
            wrong = (
                near_answer is not None
                and near_answer.answer.argmax() != values_by_row[row].argmax()
            )
            values_copy, margin = values_by_row[row].copy(), _label_margin(values_by_row[row])
            neighbours.settle(
                sent_vectors[row],
                values_copy,
                near_answer,
                outcome,
                wrong=bool(wrong),
                margin=margin,
            )
            values.append(values_by_row[row])
            distances.append(None)
        neighbours.count(outcomes)
        return predictor.numbers(self._table, np.stack(values), fingerprints, scored_at), distances


def _label_margin(values: Numbers) -> float:
    """Return the lead of the first label over the second."""
    second, first = np.partition(values, -2)[-2:]
    return float(first - second)


Matches = ListMatches | ValueMatches


class NearInput(NamedTuple):
    """Input ready for its model; `kind` is None if no near answer is allowed."""

    prepared: PreparedInput
    fingerprint: int
    kind: InputKind | None


class NearRecord(NamedTuple):
    """Live record, and the distance of the input whose answer it reuses; None for a computed one."""

    record: bytes
    distance: float | None = None


class NearMatches:
    """Near matches by generation, table and kind of input; thread-safe.

    Learned state lives as long as the generation's models: an answer is never reused in another one.
    """

    def __init__(self, configured: Mapping[str, NearConfig], rng: Random | None = None) -> None:
        self.counts: dict[str, Counter[NearOutcome]] = {name: Counter() for name in configured}
        self._configured = configured
        self._rng = rng or Random()
        self._matches: WeakKeyDictionary[Predictor, dict[tuple[str, InputKind], Matches]] = (
            WeakKeyDictionary()
        )
        self._policies: dict[tuple[str, InputKind], ReusePolicy] = {}
        self._lock = Lock()

    def check(self, snapshot: Snapshot) -> None:
        """Warn of each configured table without reusable answers in this generation."""
        for name in self._configured:
            if (reason := refusal(snapshot, name)) is not None:
                log.warning(
                    "[serving.near.%s] reuses nothing in generation %s: %s",
                    name,
                    snapshot.generation,
                    reason,
                )

    def covers(self, snapshot: Snapshot, table: str) -> bool:
        """True if answers of the table may be reused."""
        return table in self._configured and refusal(snapshot, table) is None

    def compute(
        self, jobs: Sequence[InferenceJob], batch: Sequence[PreparedInput], scored_at: int
    ) -> list[ComputedRecord]:
        """Return a record for each job of one snapshot and table with its input; raise the model's errors."""
        inputs = [
            NearInput(prepared, job.fingerprint, kind_of(job.live_input) if job.may_reuse else None)
            for job, prepared in zip(jobs, batch, strict=True)
        ]
        near_records = self.predict(jobs[0].snapshot, jobs[0].table, inputs, scored_at)
        return [
            ComputedRecord(record, prepared.unknown_id_count, distance)
            for (record, distance), prepared in zip(near_records, batch, strict=True)
        ]

    def predict(
        self, snapshot: Snapshot, table: str, inputs: Sequence[NearInput], scored_at: int
    ) -> list[NearRecord]:
        """Return a record for each input; raise the model's errors."""
        predictor = snapshot.predictor
        if predictor is None:
            raise ValueError("a snapshot without a model predicts nothing")
        records: list[NearRecord] = [NearRecord(b"")] * len(inputs)
        for kind in {near_input.kind for near_input in inputs}:
            rows = [row for row, near_input in enumerate(inputs) if near_input.kind == kind]
            batch = [inputs[row].prepared for row in rows]
            id_fingerprints = [inputs[row].fingerprint for row in rows]
            matches = None if kind is None else self._of(predictor, snapshot, table, kind)
            blocked = snapshot.blocked_ordinals
            if matches is None or matches.neighbours.policy.is_off:
                batch_records = predictor.predict(
                    table, batch, id_fingerprints, scored_at, blocked=blocked
                )
                near: list[float | None] = [None] * len(batch_records)
            else:
                # Not the version of the list: an arm obeys that of another namespace as well.
                stamp = snapshot.blocked_stamp
                batch_records, near = matches.predict(
                    predictor, batch, id_fingerprints, scored_at, blocked, stamp
                )
            for row, record, distance in zip(rows, batch_records, near, strict=True):
                records[row] = NearRecord(record, distance)
        return records

    def policies(self) -> Iterator[tuple[str, InputKind, ReusePolicy]]:
        """Yield the policy of each table and kind of input, of the most recently used generation."""
        with self._lock:  # a scrape comes while the model's threads meet a new kind
            sorted_policies = sorted(
                self._policies.items(), key=lambda keyed_policy: keyed_policy[0]
            )
        for (table, kind), policy in sorted_policies:
            yield table, kind, policy

    def _of(self, predictor: Predictor, snapshot: Snapshot, table: str, kind: InputKind) -> Matches:
        with self._lock:
            matches_by_key = self._matches.setdefault(predictor, {})
            matches = matches_by_key.get((table, kind))
            if matches is None:
                matches = matches_by_key[table, kind] = self._build_matches(
                    predictor, snapshot, table
                )
            self._policies[table, kind] = matches.neighbours.policy
            return matches

    def _build_matches(self, predictor: Predictor, snapshot: Snapshot, table: str) -> Matches:
        config, counts = self._configured[table], self.counts[table]
        layout = snapshot.manifest.tables[table].layout
        if layout.kind == "topk":
            dims = predictor.output_dims(table)
            reach = predictor.search(table).score_change_max()
            of_lists: Neighbours[Candidates] = Neighbours(
                config.error, config.entries, dims, self._rng, counts
            )
            return ListMatches(table, layout.width, config.overlap, reach, of_lists)
        dims = predictor.sent_dims(table)
        return ValueMatches(
            table, Neighbours(config.error, config.entries, dims, self._rng, counts)
        )


def kind_of(source: LiveInput) -> InputKind | None:
    """Return the kind of an input: history, features or both; None for a catalogue item, its own input."""
    if source.item is not None or not (source.history or source.features):
        return None
    if source.history and source.features:
        return "both"
    return "history" if source.history else "features"


def refusal(snapshot: Snapshot, table: str) -> str | None:
    """Return the reason why answers of the table cannot be reused in this generation; None if some can."""
    manifest_table = snapshot.manifest.tables.get(table)
    if manifest_table is None:
        return f"there is no such table; known are {', '.join(sorted(snapshot.manifest.tables))}"
    predictor = snapshot.predictor
    if predictor is None or not predictor.supports(table):
        return "no model computes its answers"
    if manifest_table.kind == "vector":
        return "its answer is the vector itself: behind its model there is nothing to spare"
    if manifest_table.kind == "value" and not predictor.takes_floats_only(table):
        return "its model takes more than float32 features, by which inputs could be compared"
    if manifest_table.kind == "value" and manifest_table.layout.width < 2:
        return "it has a single value, and no first label that could differ"
    return None


class NearMetrics(Collector):
    """Collector of counts since the start, and of the policies of the most recently used generation."""

    def __init__(self, near: NearMatches) -> None:
        self._near = near

    def collect(self) -> Iterable[Metric]:
        """Yield metric families: inputs by outcome, whether answers are reused, and their error with its interval."""
        inputs = CounterMetricFamily(
            "larder_near_inputs",
            "Inputs that no tier knew, by what became of them: far, proven, reuse, audit, learn, leave",
            labels=["table", "outcome"],
        )
        for table, counts in self._near.counts.items():
            for outcome, count in counts.copy().items():
                inputs.add_metric([table, outcome], count)
        labels = ["table", "input"]
        reusing = GaugeMetricFamily(
            "larder_near_reusing", "1 while the policy lets near answers be reused", labels=labels
        )
        off = GaugeMetricFamily(
            "larder_near_off",
            "1 once reuse has turned itself off: its error was shown to be above the bound",
            labels=labels,
        )
        error = GaugeMetricFamily(
            "larder_near_error_ratio",
            "Share of reused answers that differ from live's, by audits: measured, and the bounds of its interval",
            labels=[*labels, "bound"],
        )
        for table, kind, policy in self._near.policies():
            reusing.add_metric([table, kind], policy.is_reusing)
            off.add_metric([table, kind], policy.is_off)
            measured = policy.wrong_audits / policy.audits if policy.audits else math.nan
            bounds = (
                ("measured", measured),
                *zip(("lowest", "highest"), policy.interval, strict=True),
            )
            for bound, value in bounds:
                error.add_metric([table, kind, bound], value)
        yield from (inputs, reusing, off, error)
