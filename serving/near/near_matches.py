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

faiss: Any = faiss_module  # its type stubs are incomplete

_QUERIES_PER_SEARCH = 16
"""Queries per FAISS call: for more, FAISS would use another kernel, with other rounding."""

CLOSENESS_RANGES = 12
"""Number of closeness ranges of a policy: 0 is the farthest, each is half as wide as the previous one."""

FARTHEST_DISTANCE = 0.5
"""Distance, relative to the vector's length, from which no answer counts as near."""

_MARGIN_MIN = 1e-30

SEARCH_DEPTH_LISTS = 2
"""Candidates kept per search, as a multiple of the list's length: more candidates cover inputs farther away."""

SEARCH_DEPTH_MAX = 512

_ULP = 2.0**-23

Entry = TypeVar("Entry")

Answer = TypeVar("Answer")

OrdinalArray = NDArray[np.int64]

VectorArray = NDArray[np.float32]

NumberArray = NDArray[np.float32]

InputKind = Literal["history", "features", "both"]

NearOutcome = Decision | Literal["far", "proven"]
"""Outcome of an input: no recent answer is near, a near answer is proven to be exact, or the policy's decision."""

JUDGED_OUTCOMES: tuple[NearOutcome, ...] = ("learn", "audit")


class Nearest(NamedTuple, Generic[Entry]):
    """Nearest recent vector: its slot, its entry, and its distance relative to the query's length."""

    vector_slot: int
    entry: Entry
    relative_distance: float


class RecentVectors(Generic[Entry]):
    """Index of the `vector_count_max` most recently added or used vectors float32[dims]; not thread-safe.

    A query scans all vectors: 4,096 x 128 take about 60 us, a hundredth of a search among a hundred times as many
    items.
    """

    def __init__(self, vector_count_max: int, dims: int) -> None:
        self._vector_count_max = vector_count_max
        self._dims = dims
        self._index = faiss.IndexFlatL2(dims)
        self._index_vectors: NDArray[np.float32] | None = None
        self._entries: list[Entry] = []
        self._used_tick_by_slot = np.zeros(vector_count_max, np.int64)
        self._use_tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find_nearest(self, query_vectors: NDArray[np.float32]) -> list[Nearest[Entry] | None]:
        """Return the nearest vector of each query [n, dims]; None for a zero query, or an empty index."""
        if not self._entries:
            return [None] * len(query_vectors)
        faiss.omp_set_num_threads(1)
        nearest_entries: list[Nearest[Entry] | None] = []
        lengths = np.sqrt(np.einsum("nd,nd->n", query_vectors, query_vectors)).tolist()
        for first_index in range(0, len(query_vectors), _QUERIES_PER_SEARCH):
            query_chunk = np.ascontiguousarray(
                query_vectors[first_index : first_index + _QUERIES_PER_SEARCH], np.float32
            )
            squared_distances, slots = self._index.search(query_chunk, 1)
            squares_and_slots = zip(squared_distances[:, 0].tolist(), slots[:, 0].tolist(), strict=True)
            for length, (squared_distance, slot) in zip(lengths[first_index:], squares_and_slots, strict=False):
                is_usable = length > 0 and slot >= 0
                distance = squared_distance**0.5 / length if is_usable else 0.0
                nearest_entries.append(Nearest(slot, self._entries[slot], distance) if is_usable else None)
        return nearest_entries

    def mark_used(self, vector_slot: int) -> None:
        """Mark the entry as used; the least recently used entry is replaced first."""
        self._use_tick += 1
        self._used_tick_by_slot[vector_slot] = self._use_tick

    def add(self, added_vector: NDArray[np.float32], entry: Entry) -> None:
        """Add a vector with its entry; a full index replaces the least recently used one."""
        vector_slot = len(self._entries)
        if vector_slot < self._vector_count_max:
            self._index.add(added_vector[None])
            self._entries.append(entry)
        else:
            if self._index_vectors is None:  # memory of the FAISS index, which has its final size
                flat_vectors = faiss.rev_swig_ptr(self._index.get_xb(), self._vector_count_max * self._dims)
                self._index_vectors = flat_vectors.reshape(self._vector_count_max, self._dims)
            vector_slot = int(self._used_tick_by_slot.argmin())
            self._index_vectors[vector_slot] = added_vector
            self._entries[vector_slot] = entry
        self.mark_used(vector_slot)

    def clear(self) -> None:
        """Remove all vectors."""
        self._index = faiss.IndexFlatL2(self._dims)
        self._index_vectors = None
        self._entries.clear()
        self._used_tick_by_slot[:] = 0


@dataclass(slots=True, eq=False)
class KeptAnswer(Generic[Answer]):
    """Recent answer, its margin, and the smallest distance at which it proved wrong."""

    answer: Answer
    answer_margin: float
    wrong_at_distance: float


class NearAnswer(NamedTuple, Generic[Answer]):
    """Recent answer near an input: its slot, and its distance relative to the length of the input's vector.

    `closeness_index` is the policy's range for it.
    """

    kept_answer: KeptAnswer[Answer]
    relative_distance: float
    vector_slot: int
    closeness_index: int

    @property
    def answer(self) -> Answer:
        """The answer."""
        return self.kept_answer.answer


class Neighbours(Generic[Answer]):
    """Recent answers of one table, generation and kind of input; thread-safe."""

    def __init__(
        self,
        error_share_max: float,
        vector_count_max: int,
        dims: int,
        rng: Random,
        count_by_outcome: Counter[NearOutcome],
    ) -> None:
        self.policy = ReusePolicy(error_share_max, CLOSENESS_RANGES, rng)
        self._recent_vectors: RecentVectors[KeptAnswer[Answer]] = RecentVectors(vector_count_max, dims)
        self._count_by_outcome = count_by_outcome
        self._blocklist_stamp = 0
        self._lock = Lock()

    def find_near(
        self, query_vectors: NDArray[np.float32], blocklist_stamp: int = 0
    ) -> list[NearAnswer[Answer] | None]:
        """Return each vector's [n, dims] nearest answer; None if none is near, or it was wrong at a smaller distance.

        A later `blocklist_stamp` drops all earlier answers; for an earlier version nothing is found.
        """
        with self._lock:
            if blocklist_stamp > self._blocklist_stamp:
                self._blocklist_stamp = blocklist_stamp
                self._recent_vectors.clear()
            if blocklist_stamp < self._blocklist_stamp:
                return [None] * len(query_vectors)
            nearest_entries = self._recent_vectors.find_nearest(query_vectors)
        return [None if nearest is None else _near_answer(nearest) for nearest in nearest_entries]

    def may_use(self, near_answer: NearAnswer[Answer]) -> bool:
        """True unless the policy will neither reuse nor judge such answers."""
        with self._lock:
            return self.policy.may_use(near_answer.closeness_index)

    def decide(self, near_answer: NearAnswer[Answer]) -> Decision:
        """Return the policy's decision about a near answer."""
        with self._lock:
            self._recent_vectors.mark_used(near_answer.vector_slot)
            return self.policy.decide(near_answer.closeness_index)

    def judge_and_store(
        self,
        query_vector: NDArray[np.float32],
        answer: Answer,
        near_answer: NearAnswer[Answer] | None,
        outcome: NearOutcome,
        *,
        is_wrong: bool,
        answer_margin: float = 1.0,
        blocklist_stamp: int = 0,
    ) -> None:
        """Judge the near answer by a computed one; store the computed one unless the near one was right.

        A smaller `answer_margin` means that near inputs are more likely to have another answer.
        """
        wrong_at_distance = math.inf
        with self._lock:
            if near_answer is not None and outcome in JUDGED_OUTCOMES:
                self.policy.judge(near_answer.closeness_index, is_audit=outcome == "audit", is_wrong=is_wrong)
                if not is_wrong:
                    return
                wrong_at_distance = near_answer.relative_distance
                near_answer.kept_answer.wrong_at_distance = min(
                    near_answer.kept_answer.wrong_at_distance, wrong_at_distance
                )
            # A zero vector, or one with infinite or NaN components, has no neighbours.
            is_sound = 0 < float(np.abs(query_vector).max(initial=0)) < math.inf and 0 <= answer_margin < math.inf
            if is_sound and blocklist_stamp == self._blocklist_stamp:
                self._recent_vectors.add(query_vector, KeptAnswer(answer, answer_margin, wrong_at_distance))

    def count(self, outcomes: Sequence[NearOutcome]) -> None:
        """Count inputs by outcome."""
        with self._lock:
            self._count_by_outcome.update(outcomes)


def _near_answer(nearest: Nearest[KeptAnswer[Answer]]) -> NearAnswer[Answer] | None:
    kept_answer, distance = nearest.entry, nearest.relative_distance
    if not distance < min(FARTHEST_DISTANCE, kept_answer.wrong_at_distance):
        return None
    return NearAnswer(kept_answer, distance, nearest.vector_slot, closeness_range(distance, kept_answer.answer_margin))


def closeness_range(relative_distance: float, answer_margin: float) -> int:
    """Return the number of the closeness range of a distance divided by the answer's margin.

    The probability of a different answer depends on the distance relative to the margin, not on distance alone.
    """
    if relative_distance <= 0:
        return CLOSENESS_RANGES - 1
    halving_count = int(math.log2(max(answer_margin, _MARGIN_MIN) * FARTHEST_DISTANCE / relative_distance))
    return min(max(halving_count, 0), CLOSENESS_RANGES - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Candidates of one search, best first, padded with -1; no other item scores above `score_bound`.

    Scores are for the query's unit vector; `score_bound` is infinite if the index is not exact.
    """

    candidate_ordinals: NDArray[np.int32]
    score_bound: float


class ListMatches:
    """Near matches of one top-K table for one kind of input.

    Only the search is skipped: exclusions, scores and order are as in any live answer. An item is missed only if it is
    not among the neighbour's candidates; an answer is wrong if it has less than `overlap_min` of the list that live
    would give.

    `score_reach`, if the index is exact, is the largest change of a score over a distance of 1. No item beyond the
    candidates then scores above `score_bound` + distance x reach (Cauchy-Schwarz): a list whose last item scores higher
    is proven to be the live answer, whatever the policy says.
    """

    def __init__(
        self,
        table_name: str,
        list_length: int,
        overlap_min: float,
        score_change_per_distance: float | None,
        neighbours: Neighbours[Candidates],
    ) -> None:
        self.neighbours = neighbours
        self._table = table_name
        self._list_length = list_length
        self._overlap_min = overlap_min
        self._score_change_per_distance = score_change_per_distance

    def predict(
        self,
        predictor: Predictor,
        prepared_inputs: Sequence[PreparedInput],
        id_fingerprints: Sequence[int],
        scored_at: int,
        blocked_ordinals: OrdinalArray,
        blocklist_stamp: int,
    ) -> tuple[list[bytes], list[float | None]]:
        """Return a record for each input, and the distance of the input whose candidates were reused, None if computed.

        `blocklist_stamp` grows with each blocklist; `blocked_ordinals` are the current one's ordinals.
        """
        neighbours, search = self.neighbours, predictor.search(self._table)
        vectors = predictor.vectors(prepared_inputs)
        lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))[:, None]
        directions = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        excluded_by_row = search.excluded_by_input(prepared_inputs, blocked_ordinals)
        needed_depths = search.candidate_counts(excluded_by_row)
        needed_depth_by_row = needed_depths.tolist()
        near_answers = neighbours.find_near(directions, blocklist_stamp)
        near_answer_by_row = {
            row: near_answer
            for row, near_answer in enumerate(near_answers)
            if near_answer is not None and self._is_worth_reusing(near_answer, needed_depth_by_row[row])
        }
        outcomes: list[NearOutcome] = ["far" if near_answer is None else "leave" for near_answer in near_answers]
        ordinals = np.full((len(prepared_inputs), self._list_length), NO_ITEM, np.uint32)
        scores = np.zeros((len(prepared_inputs), self._list_length), np.float32)
        if rows := list(near_answer_by_row):
            candidate_sets, row_exclusions = (
                [near_answer_by_row[row].answer for row in rows],
                [excluded_by_row[row] for row in rows],
            )
            candidates = [candidate_set.candidate_ordinals.astype(np.int64) for candidate_set in candidate_sets]
            ordinals[rows], scores[rows] = search.rank_candidates(vectors[rows], candidates, row_exclusions)
            distances = np.array([near_answer_by_row[row].relative_distance for row in rows])
            proven_flags = self._are_proven(search, directions[rows], ordinals[rows, -1], candidate_sets, distances)
            for row, is_proven in zip(rows, proven_flags, strict=True):
                outcomes[row] = "proven" if is_proven else neighbours.decide(near_answer_by_row[row])
        if rows := [row for row, row_outcome in enumerate(outcomes) if row_outcome not in ("proven", "reuse")]:
            search_depth = min(SEARCH_DEPTH_LISTS * self._list_length, SEARCH_DEPTH_MAX, search.searcher.depth_max)
            deep_ordinals_by_row = search.candidates(
                vectors[rows], np.maximum(needed_depths[rows], search_depth), blocked_ordinals
            )
            needed_candidates = [
                deep_ordinals[: needed_depth_by_row[row]]
                for row, deep_ordinals in zip(rows, deep_ordinals_by_row, strict=True)
            ]
            best_lists = search.rank_candidates(
                vectors[rows], needed_candidates, [excluded_by_row[row] for row in rows]
            )
            searched_candidate_sets = self._to_candidates(search, directions[rows], deep_ordinals_by_row)
            for row, answer, best_items in zip(rows, searched_candidate_sets, best_lists[0], strict=True):
                is_judged = outcomes[row] in JUDGED_OUTCOMES
                is_wrong = is_judged and _list_overlap(ordinals[row], best_items) < self._overlap_min
                neighbours.judge_and_store(
                    directions[row], answer, near_answer_by_row.get(row), outcomes[row],
                    is_wrong=is_wrong, blocklist_stamp=blocklist_stamp,
                )  # fmt: skip
            ordinals[rows], scores[rows] = best_lists
        neighbours.count(outcomes)
        reused = [
            round(near_answer_by_row[row].relative_distance, 6) if outcome == "reuse" else None
            for row, outcome in enumerate(outcomes)
        ]
        return predictor.lists(self._table, (ordinals, scores), id_fingerprints, scored_at), reused

    def _is_worth_reusing(self, near_answer: NearAnswer[Candidates], needed_depth: int) -> bool:
        """True if the near candidates suffice for a list and may be reused."""
        may_use = self._score_change_per_distance is not None or self.neighbours.may_use(near_answer)
        return may_use and len(near_answer.answer.candidate_ordinals) >= needed_depth

    def _are_proven(
        self,
        search: ListSearch,
        query_directions: VectorArray,
        last_ordinals: NDArray[np.uint32],
        candidate_sets: Sequence[Candidates],
        relative_distances: NDArray[np.float64],
    ) -> list[bool]:
        """Return whether each list (ending with `last_ordinals`) is proven: no other item can be in it."""
        if self._score_change_per_distance is None:
            return [False] * len(candidate_sets)
        is_full = last_ordinals != NO_ITEM
        score_bounds = np.array([candidate_set.score_bound for candidate_set in candidate_sets])
        last_scores = search.scores(query_directions, np.where(is_full, last_ordinals, 0).astype(np.int64))
        rounding = 4 * query_directions.shape[1] * _ULP  # rounding error of four sums of this many products
        is_above_bound = last_scores > score_bounds + (relative_distances + rounding) * self._score_change_per_distance
        proven_flags: list[bool] = (np.isneginf(score_bounds) | (is_full & is_above_bound)).tolist()
        return proven_flags

    def _to_candidates(
        self, search: ListSearch, query_directions: VectorArray, searched_ordinals: Sequence[OrdinalArray]
    ) -> list[Candidates]:
        """Copy the searched ordinals to candidates, so that they do not keep their batch alive."""
        score_bounds = np.full(len(searched_ordinals), math.inf)
        if self._score_change_per_distance is not None:
            last_ordinals = np.array([row_ordinals[-1] for row_ordinals in searched_ordinals])
            is_whole_catalogue = (last_ordinals < 0) | (
                np.array([len(row_ordinals) for row_ordinals in searched_ordinals]) == search.items.count
            )
            scores = search.scores(query_directions, np.maximum(last_ordinals, 0))
            score_bounds = np.where(is_whole_catalogue, -math.inf, scores.astype(np.float64))
        return [
            Candidates(row_ordinals.astype(np.int32), score_bound)
            for row_ordinals, score_bound in zip(searched_ordinals, score_bounds.tolist(), strict=True)
        ]


def _list_overlap(reused_items: NDArray[np.uint32], computed_items: NDArray[np.uint32]) -> float:
    """Return the share of the computed items that the reused list has; 1 if there are none."""
    computed_ordinals = set(computed_items.tolist()) - {NO_ITEM}
    return (
        len(computed_ordinals.intersection(reused_items.tolist())) / len(computed_ordinals)
        if computed_ordinals
        else 1.0
    )


class ValueMatches:
    """Near matches of one value table for one kind of input.

    The model's output is the answer, so there is no search to skip: inputs are compared by the sent numbers, and the
    model is skipped. An answer is wrong if its first label differs.
    """

    def __init__(self, table_name: str, neighbours: Neighbours[NumberArray]) -> None:
        self.neighbours = neighbours
        self._table = table_name

    def predict(
        self,
        predictor: Predictor,
        prepared_inputs: Sequence[PreparedInput],
        id_fingerprints: Sequence[int],
        scored_at: int,
        blocked_ordinals: NDArray[np.int64],  # noqa: ARG002 - no list, nothing to leave out
        blocklist_stamp: int,  # noqa: ARG002
    ) -> tuple[list[bytes], list[float | None]]:
        """Return a record for each input, and the distance of the input whose values were reused, None if computed."""
        neighbours = self.neighbours
        sent_vectors = predictor.sent_vectors(self._table, prepared_inputs)
        near_answers = neighbours.find_near(sent_vectors)
        outcomes: list[NearOutcome] = [
            "far" if near_answer is None else neighbours.decide(near_answer) for near_answer in near_answers
        ]
        rows = [row for row, outcome in enumerate(outcomes) if outcome != "reuse"]
        computed_values = (
            predictor.vectors([prepared_inputs[row] for row in rows]) if rows else np.empty((0, 0), np.float32)
        )
        values_by_row = dict(zip(rows, computed_values, strict=True))
        answer_values: list[NumberArray] = []
        reused_distances: list[float | None] = []
        for row, (near_answer, outcome) in enumerate(zip(near_answers, outcomes, strict=True)):
            if near_answer is not None and outcome == "reuse":
                answer_values.append(near_answer.answer)
                reused_distances.append(round(near_answer.relative_distance, 6))
                continue
            is_wrong = near_answer is not None and near_answer.answer.argmax() != values_by_row[row].argmax()
            values_copy, margin = values_by_row[row].copy(), _label_margin(values_by_row[row])
            neighbours.judge_and_store(
                sent_vectors[row], values_copy, near_answer, outcome, is_wrong=bool(is_wrong), answer_margin=margin
            )
            answer_values.append(values_by_row[row])
            reused_distances.append(None)
        neighbours.count(outcomes)
        return predictor.numbers(self._table, np.stack(answer_values), id_fingerprints, scored_at), reused_distances


def _label_margin(label_values: NumberArray) -> float:
    """Return the lead of the first label over the second."""
    second_value, first_value = np.partition(label_values, -2)[-2:]
    return float(first_value - second_value)


Matches = ListMatches | ValueMatches


class NearInput(NamedTuple):
    """Input ready for its model; `input_kind` is None if no near answer is allowed."""

    prepared_input: PreparedInput
    id_fingerprint: int
    input_kind: InputKind | None


class NearRecord(NamedTuple):
    """Live record, and the distance of the input whose answer it reuses; None for a computed one."""

    record: bytes
    reused_distance: float | None = None


class NearMatches:
    """Near matches by generation, table and kind of input; thread-safe.

    Learned state lives as long as the generation's models: answers are never reused in another generation.
    """

    def __init__(self, config_by_table: Mapping[str, NearConfig], rng: Random | None = None) -> None:
        self.outcome_counts_by_table: dict[str, Counter[NearOutcome]] = {
            table_name: Counter() for table_name in config_by_table
        }
        self._config_by_table = config_by_table
        self._rng = rng or Random()
        self._matches_by_predictor: WeakKeyDictionary[Predictor, dict[tuple[str, InputKind], Matches]] = (
            WeakKeyDictionary()
        )
        self._policy_by_key: dict[tuple[str, InputKind], ReusePolicy] = {}
        self._lock = Lock()

    def check(self, snapshot: Snapshot) -> None:
        """Log a warning for each configured table whose answers cannot be reused in this generation."""
        for table_name in self._config_by_table:
            if (reason := refusal_reason(snapshot, table_name)) is not None:
                log.warning(
                    "[serving.near.%s] has no effect in generation %s: %s", table_name, snapshot.generation, reason
                )

    def covers_table(self, snapshot: Snapshot, table_name: str) -> bool:
        """True if answers of the table may be reused."""
        return table_name in self._config_by_table and refusal_reason(snapshot, table_name) is None

    def compute(
        self, jobs: Sequence[InferenceJob], prepared_inputs: Sequence[PreparedInput], scored_at: int
    ) -> list[ComputedRecord]:
        """Return a record for each job of one snapshot and table with its input; raise the model's errors."""
        inputs = [
            NearInput(prepared, job.id_fingerprint, input_kind(job.live_input) if job.may_reuse_near_answer else None)
            for job, prepared in zip(jobs, prepared_inputs, strict=True)
        ]
        near_records = self.predict(jobs[0].snapshot, jobs[0].table, inputs, scored_at)
        return [
            ComputedRecord(record, prepared.unknown_id_count, distance)
            for (record, distance), prepared in zip(near_records, prepared_inputs, strict=True)
        ]

    def predict(
        self, snapshot: Snapshot, table_name: str, near_inputs: Sequence[NearInput], scored_at: int
    ) -> list[NearRecord]:
        """Return a record for each input; raise the model's errors."""
        predictor = snapshot.predictor
        if predictor is None:
            raise ValueError("the snapshot has no model")
        near_records: list[NearRecord] = [NearRecord(b"")] * len(near_inputs)
        for input_kind_of_batch in {near_input.input_kind for near_input in near_inputs}:
            rows = [row for row, near_input in enumerate(near_inputs) if near_input.input_kind == input_kind_of_batch]
            batch = [near_inputs[row].prepared_input for row in rows]
            id_fingerprints = [near_inputs[row].id_fingerprint for row in rows]
            matches = (
                None
                if input_kind_of_batch is None
                else self._find_matches(predictor, snapshot, table_name, input_kind_of_batch)
            )
            blocked = snapshot.blocked_item_ordinals
            if matches is None or matches.neighbours.policy.is_off:
                batch_records = predictor.predict(
                    table_name, batch, id_fingerprints, scored_at, blocked_ordinals=blocked
                )
                reused_distances: list[float | None] = [None] * len(batch_records)
            else:
                # Not the blocklist's version: an arm also enforces the blocklist of another namespace.
                blocked_stamp = snapshot.blocklist_stamp
                batch_records, reused_distances = matches.predict(
                    predictor, batch, id_fingerprints, scored_at, blocked, blocked_stamp
                )
            for row, record, distance in zip(rows, batch_records, reused_distances, strict=True):
                near_records[row] = NearRecord(record, distance)
        return near_records

    def policies(self) -> Iterator[tuple[str, InputKind, ReusePolicy]]:
        """Yield the policy of each table and kind of input, of the most recently used generation."""
        with self._lock:  # a copy: the model's threads may add kinds during a scrape
            sorted_policies = sorted(self._policy_by_key.items(), key=lambda keyed_policy: keyed_policy[0])
        for (table, kind), policy in sorted_policies:
            yield table, kind, policy

    def _find_matches(self, predictor: Predictor, snapshot: Snapshot, table_name: str, kind: InputKind) -> Matches:
        with self._lock:
            matches_by_key = self._matches_by_predictor.setdefault(predictor, {})
            matches = matches_by_key.get((table_name, kind))
            if matches is None:
                matches = matches_by_key[table_name, kind] = self._build_matches(predictor, snapshot, table_name)
            self._policy_by_key[table_name, kind] = matches.neighbours.policy
            return matches

    def _build_matches(self, predictor: Predictor, snapshot: Snapshot, table_name: str) -> Matches:
        config, count_by_outcome = (self._config_by_table[table_name], self.outcome_counts_by_table[table_name])
        layout = snapshot.manifest.tables[table_name].layout
        if layout.kind == "topk":
            dims = predictor.output_dims(table_name)
            score_reach = predictor.search(table_name).score_change_max()
            list_neighbours: Neighbours[Candidates] = Neighbours(
                config.error, config.entries, dims, self._rng, count_by_outcome
            )
            return ListMatches(table_name, layout.width, config.overlap, score_reach, list_neighbours)
        dims = predictor.sent_dims(table_name)
        return ValueMatches(table_name, Neighbours(config.error, config.entries, dims, self._rng, count_by_outcome))


def input_kind(live_input: LiveInput) -> InputKind | None:
    """Return the kind of an input: history, features or both; None for a catalogue item, its own input."""
    if live_input.item_ordinal is not None or not (live_input.history or live_input.features):
        return None
    if live_input.history and live_input.features:
        return "both"
    return "history" if live_input.history else "features"


def refusal_reason(snapshot: Snapshot, table_name: str) -> str | None:
    """Return the reason why answers of the table cannot be reused in this generation; None if some can."""
    manifest_table = snapshot.manifest.tables.get(table_name)
    if manifest_table is None:
        return f"there is no such table; the tables are {', '.join(sorted(snapshot.manifest.tables))}"
    predictor = snapshot.predictor
    if predictor is None or not predictor.supports(table_name):
        return "no model computes its answers"
    if manifest_table.kind == "vector":
        return "its answer is the vector itself: there is no search to skip"
    if manifest_table.kind == "value" and not predictor.takes_floats_only(table_name):
        return "its model takes more than float32 features, by which inputs could be compared"
    if manifest_table.kind == "value" and manifest_table.layout.width < 2:
        return "it has a single value, so there is no first label to compare"
    return None


class NearMetrics(Collector):
    """Collector of counts since the start, and of the policies of the most recently used generation."""

    def __init__(self, near_matches: NearMatches) -> None:
        self._near_matches = near_matches

    def collect(self) -> Iterable[Metric]:
        """Yield metric families: inputs by outcome, whether answers are reused, and their error with its interval."""
        inputs_family = CounterMetricFamily(
            "larder_near_inputs",
            "Inputs without a stored answer, by outcome: far, proven, reuse, audit, learn, leave",
            labels=["table", "outcome"],
        )
        for table, count_by_outcome in self._near_matches.outcome_counts_by_table.items():
            for outcome, count in count_by_outcome.copy().items():
                inputs_family.add_metric([table, outcome], count)
        label_names = ["table", "input"]
        reusing_family = GaugeMetricFamily(
            "larder_near_reusing", "1 while the policy allows reuse of near answers", labels=label_names
        )
        off_family = GaugeMetricFamily(
            "larder_near_off",
            "1 once reuse has been turned off, because its error was shown to be above the bound",
            labels=label_names,
        )
        error_family = GaugeMetricFamily(
            "larder_near_error_ratio",
            "Share of reused answers that differ from live's, by audits: measured, and the bounds of its interval",
            labels=[*label_names, "bound"],
        )
        for table, kind, policy in self._near_matches.policies():
            reusing_family.add_metric([table, kind], policy.is_reusing)
            off_family.add_metric([table, kind], policy.is_off)
            measured_error = policy.wrong_audits / policy.audits if policy.audits else math.nan
            error_bounds = (
                ("measured", measured_error),
                *zip(("lowest", "highest"), policy.error_interval, strict=True),
            )
            for bound_name, error_value in error_bounds:
                error_family.add_metric([table, kind, bound_name], error_value)
        yield from (inputs_family, reusing_family, off_family, error_family)
