"""Hooks of the engine, in the order of a request: rewrite, compute, shape; features fill them when they attach.

`Ladder.newer_inputs`, `BatchInference.reuse` and `compute_newer`, and `Ladder.shaper` hold them. Without features an
answer is the nightly record or the model's output.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

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
from serving.requests.models import LookupRequest
from serving.requests.options import RequestOptions

_NO_PACKED_INPUTS: Final[Mapping[bytes, bytes]] = {}

ReadRecords = Callable[[Sequence[RecordKey]], Awaitable[Sequence[ReadResult]]]
"""Reads nightly records; returns one outcome per record key, in order."""


class NewerInputs:
    """Inputs that are newer than the night's, and new items: the hook `rewrite`. This base class has none."""

    @property
    def packed_input_by_id(self) -> Mapping[bytes, bytes]:
        """Newer inputs by id; always the same mapping. When the input of an id changes, its value is another object."""
        return _NO_PACKED_INPUTS

    def changes_answer(self, _snapshot: Snapshot, _table: Table, _raw_id: bytes, /) -> bool:
        """True if the table's answer for the id has to differ from the night's."""
        return False

    async def count_newer(
        self,
        _snapshot: Snapshot,
        _pendings: Sequence[PendingAnswer],
        _options: RequestOptions,
        _read_records: ReadRecords,
        /,
    ) -> None:
        """Add newer inputs and new items to pending answers, unless the request declines them."""

    def copy_newer_input(self, _snapshot: Snapshot, _pending: PendingAnswer, _sibling: PendingAnswer, /) -> None:
        """Give a pending answer the newer input of another one, of another table: both are parts of one answer."""


class AnswerReuse(Protocol):
    """Replacement for the model's predictor that may reuse the answer computed for another input."""

    def covers_table(self, snapshot: Snapshot, table_name: str) -> bool:
        """True if answers of the table may be reused."""

    def compute(
        self, jobs: Sequence[InferenceJob], prepared_inputs: Sequence[PreparedInput], scored_at: int
    ) -> Sequence[ComputedRecord]:
        """Return a record for each job; `prepared_inputs` has their inputs. Raise the model's errors."""


ComputeNewer = Callable[[Sequence[InferenceJob], int], list[InferenceOutcome]]
"""Runs one inference for jobs with a `newer_input`, at a time in Unix seconds."""


class ListShaper:
    """Filtering and re-ranking of lists: the hook `shape`. This base class refuses both. Times are monotonic."""

    async def lookup(
        self, _served: ServedGenerations, request: LookupRequest, _request_started_at: float, /
    ) -> list[AnswerJson]:
        """Answer each entity of a request with a filter or a re-ranking once, in order, from captured generations."""
        raise _unshaped_problem("rerank" if request.options.filter is None else "filter")

    def cached_mask(self, _snapshot: Snapshot, _options: RequestOptions, /) -> FilterMask | None:
        """Return the mask of the items that pass the filter if it is cached, else None."""
        return None

    def filter_mask(
        self, _snapshot: Snapshot, options: RequestOptions, _deadline_at: float, /
    ) -> Awaitable[FilterMask | None]:
        """Return the mask of the items that pass the filter, None without one; raise Problem for an invalid filter."""
        return _refuse_sent("filter", options.filter)

    def reranker(
        self, _snapshot: Snapshot, options: RequestOptions, _deadline_at: float, /
    ) -> Awaitable[Reranker | None]:
        """Return the re-ranker of the items, None without one; raise Problem for an unsupported re-ranking."""
        return _refuse_sent("rerank", options.rerank)


async def _refuse_sent(option_name: str, sent_value: object) -> None:
    if sent_value is not None:
        raise _unshaped_problem(option_name)


def _unshaped_problem(option_name: str) -> Problem:
    message = f"this service does not filter or re-rank lists: send no {option_name}"
    return unprocessable(f"invalid_{option_name}", message, option_name)
