"""Hooks of the engine, in the order of a request: rewrite, compute, shape; a feature fills each when it attaches.

`Ladder.newer_inputs`, `BatchInference.reuse` and `compute_newer`, and `Ladder.shaper` hold them. Without the feature an
answer is the night's, or the model's.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from cache.format.manifest import Table
from cache.model.filter_mask import FilterMask
from cache.model.input_preparation import PreparedInput
from cache.tiers.reads import ReadResult, RecordKey
from serving.engine.entity import PendingAnswer
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, InferenceOutcome
from serving.engine.rendering.answer_fields import AnswerJson, Reranker
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.requests.errors import Problem, unprocessable
from serving.requests.models import LookupRequest, RequestOptions

ReadRecords = Callable[[Sequence[RecordKey]], Awaitable[Sequence[ReadResult]]]
"""Reader of nightly records: one outcome per record key, in order."""


class NewerInputs(Protocol):
    """Inputs of answers that are newer than the night, and new items; hook `rewrite`."""

    @property
    def packed(self) -> Mapping[bytes, bytes]:
        """Newer inputs by id, the same mapping for good; with each change the id gets another object."""

    def changes(self, snapshot: Snapshot, table: Table, raw: bytes) -> bool:
        """True if an answer of the table for the id is to be another one than the night's."""

    async def count_newer(
        self,
        snapshot: Snapshot,
        cases: Sequence[PendingAnswer],
        options: RequestOptions,
        read_records: ReadRecords,
    ) -> None:
        """Add newer inputs and new items to pending answers, unless the request declines them."""

    def count_as(
        self, snapshot: Snapshot, case: PendingAnswer, sibling_pending: PendingAnswer
    ) -> None:
        """Give a pending answer the newer input of another table's: both are parts of one answer."""


class NoNewerInputs:
    """Newer inputs of a service without the feature that makes some."""

    def __init__(self) -> None:
        self.packed: Mapping[bytes, bytes] = {}

    def changes(self, _snapshot: Snapshot, _table: Table, _raw: bytes) -> bool:
        """Nothing is newer."""
        return False

    async def count_newer(
        self,
        _snapshot: Snapshot,
        _cases: Sequence[PendingAnswer],
        _options: RequestOptions,
        _read_records: ReadRecords,
    ) -> None:
        """Add nothing."""

    def count_as(
        self, _snapshot: Snapshot, _case: PendingAnswer, _sibling_pending: PendingAnswer
    ) -> None:
        """Add nothing."""


class AnswerReuse(Protocol):
    """Predictor in place of the model, which may give an input the answer that live computed for another."""

    def covers(self, snapshot: Snapshot, table: str) -> bool:
        """True if answers of the table may be reused."""

    def compute(
        self, jobs: Sequence[InferenceJob], batch: Sequence[PreparedInput], scored_at: int
    ) -> Sequence[ComputedRecord]:
        """Return a record for each job, whose inputs `batch` holds; raise the model's errors."""


ComputeNewer = Callable[[Sequence[InferenceJob], int], list[InferenceOutcome]]
"""Runs one inference for jobs with a `newer_input`, at a time in Unix seconds."""


class ListShaper(Protocol):
    """Filters and other orders of lists; hook `shape`. Times are monotonic."""

    def lookup(
        self, served: ServedGenerations, request: LookupRequest, started: float
    ) -> Awaitable[list[AnswerJson]]:
        """Answer each entity of a request with a filter or a re-ranking once, in order, from captured generations."""

    def cached_mask(self, snapshot: Snapshot, options: RequestOptions) -> FilterMask | None:
        """Return the mask of the items that pass the filter, if it is known already."""

    def filter_mask(
        self, snapshot: Snapshot, options: RequestOptions, deadline: float
    ) -> Awaitable[FilterMask | None]:
        """Return the mask of the items that pass the filter, None without one; raise Problem if there can be none."""

    def reranker(
        self, snapshot: Snapshot, options: RequestOptions, deadline: float
    ) -> Awaitable[Reranker | None]:
        """Return the re-ranker of the items, None without one; raise Problem if there can be none."""


class NoShaper:
    """Shaper of a service without the feature: a request with a filter or a re-ranking is refused."""

    async def lookup(
        self, _served: ServedGenerations, request: LookupRequest, _started: float
    ) -> list[AnswerJson]:
        """Raise Problem."""
        raise _no_shape("rerank" if request.options.filter is None else "filter")

    def cached_mask(self, _snapshot: Snapshot, _options: RequestOptions) -> FilterMask | None:
        """No filter is known."""
        return None

    async def filter_mask(
        self, _snapshot: Snapshot, options: RequestOptions, _deadline: float
    ) -> FilterMask | None:
        """None; raise Problem for a filter."""
        if options.filter is not None:
            raise _no_shape("filter")
        return None

    async def reranker(
        self, _snapshot: Snapshot, options: RequestOptions, _deadline: float
    ) -> Reranker | None:
        """None; raise Problem for a re-ranking."""
        if options.rerank is not None:
            raise _no_shape("rerank")
        return None


def _no_shape(option: str) -> Problem:
    problem_message = f"this service has lists as the night made them: send no {option}"
    return unprocessable(f"invalid_{option}", problem_message, option)
