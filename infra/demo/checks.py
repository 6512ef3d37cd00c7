"""Checks of the invariants that a caller can verify for every answer."""

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from serving.client import Answer, Entity, Policy
from serving.requests.answers import STORED_SOURCES, Source

POLICY = Policy(attempts=1, deadline_ms=5_000.0, max_batch=200, at_once=1)
"""Client policy: no retries, so that the service's counters match, and short batches, which a busy service accepts."""


class InvariantViolation(RuntimeError):
    """An invariant is violated; the message says which."""


@dataclass(frozen=True, slots=True)
class Question:
    """Entity of a request with its input, and the items that its answer must not contain (`hidden_items`)."""

    table_name: str
    entity_id: str
    k: int | None = None
    hidden_items: frozenset[str] = frozenset()
    history_items: tuple[str, ...] | None = None
    value_by_feature: Mapping[str, str] | None = None

    @property
    def entity(self) -> Entity:
        """Return the entity for a request whose entities each name a table."""
        return Entity(self.entity_id, self.history_items, self.value_by_feature, self.table_name)


@dataclass(slots=True)
class Judge:
    """Counts answers by source and generation, and records violations of invariants; thread-safe."""

    history_by_user: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rolled_back_generations: set[str] = field(default_factory=set)
    answers_by_source: Counter[str] = field(default_factory=Counter)
    answers_by_generation: Counter[str] = field(default_factory=Counter)
    request_count: int = 0
    violations: list[str] = field(default_factory=list)
    _items_by_question: dict[tuple[str, str, str], tuple[str, ...]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stop_if_broken(self) -> None:
        """Raise InvariantViolation if a violation was recorded."""
        if self.violations:
            examples = "; ".join(self.violations[:3])
            raise InvariantViolation(f"{len(self.violations)} violations, such as: {examples}")

    def request(
        self, questions: Sequence[Question], answers: Sequence[Answer], rolled_back_generations: Collection[str] = ()
    ) -> None:
        """Check the answers of a request; `rolled_back_generations` had been rolled back before it was sent."""
        answering_generations = {answer.generation for answer in answers if answer.source != Source.PREVIOUS}
        with self._lock:
            self.request_count += 1
            if len(answering_generations) > 1:
                self.violations.append(f"one request has several generations: {sorted(answering_generations)}")
            for question, answer in zip(questions, answers, strict=True):
                self.answers_by_source[answer.source] += 1
                self.answers_by_generation[answer.generation] += 1
                if answer.generation in rolled_back_generations:
                    self.violations.append(f"{answer.generation} answers after it was rolled back")
                for violation_text in (*_judge_answer(question, answer), *self._judge_list(question, answer)):
                    self.violations.append(f"{question.table_name}/{question.entity_id}: {violation_text}")

    def _judge_list(self, question: Question, answer: Answer) -> Iterator[str]:
        if (items := answer.items) is None:
            return
        scores = np.zeros(0) if answer.scores is None else answer.scores
        if not len(items) == len(scores) == len(set(items)):
            yield f"{len(items)} items and {len(scores)} scores, or a repeated item"
        if (np.diff(scores) > 0).any():
            yield "scores are not in order"
        k = len(items) + answer.short if question.k is None else question.k
        if len(items) > k or (len(items) < k) != answer.short:
            yield f"{len(items)} of {k} items, short = {answer.short}"
        if hidden_items_listed := question.hidden_items.intersection(items):
            yield f"{sorted(hidden_items_listed)[:3]} was returned although the request sent or excluded it"
        if answer.producer != "batch":
            return
        history = self.history_by_user.get(question.entity_id, ()) if question.table_name == "user_topk" else ()
        if hidden_items_listed := frozenset(history).intersection(items):
            yield f"{sorted(hidden_items_listed)[:3]} is in the user's own history"
        # A generation is immutable: without exclusions, an entity has the same list in every tier at any time.
        if not question.hidden_items and answer.source in STORED_SOURCES:
            question_key = (answer.generation, question.table_name, question.entity_id)
            first_items = self._items_by_question.setdefault(question_key, items)
            if any(first_item != item for first_item, item in zip(first_items, items, strict=False)):
                yield f"two different answers within {answer.generation}"
            self._items_by_question[question_key] = max(first_items, items, key=len)

    def audit_answers(self, metrics_text: str, published_generations: Collection[str]) -> None:
        """Compare all answers with the service's counters and the published generations; raise InvariantViolation."""
        self.violations += metric_contradictions(metrics_text, self.answers_by_source)
        if unpublished_generations := self.answers_by_generation.keys() - set(published_generations):
            self.violations.append(f"answers from {sorted(unpublished_generations)}, which never was live")
        self.stop_if_broken()


def _judge_answer(question: Question, answer: Answer) -> Iterator[str]:
    if answer.source not in set(Source):
        yield f"source {answer.source!r}"
    if answer.id != question.entity_id:
        yield f"got the answer for {answer.id!r}"
    if answer.source not in STORED_SOURCES and not answer.reason:
        yield f"source {answer.source} without a reason"


def metric_contradictions(metrics_text: str, answers_by_source: Mapping[str, int]) -> list[str]:
    """Return contradictions within the text of /metrics, or between it and `answers_by_source`."""
    count_by_label_by_metric: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            label = sample.labels.get("source") or sample.labels.get("status", "")[:1]
            count_by_label_by_metric[sample.name][label] += int(sample.value)
    answer_count_by_source = count_by_label_by_metric["larder_answers_total"]
    live_or_worse = answer_count_by_source.total() - sum(answer_count_by_source[source] for source in STORED_SOURCES)
    compared_counts = (
        ("entities", count_by_label_by_metric["larder_entities_total"].total(), sum(answers_by_source.values())),
        ("answers by source", +answer_count_by_source, +Counter(answers_by_source)),
        ("misses with a reason", count_by_label_by_metric["larder_misses_total"].total(), live_or_worse),
        ("responses with status 500 or more", count_by_label_by_metric["larder_requests_total"]["5"], 0),
    )
    return [
        f"/metrics: {count_name}: {actual_count}, not {expected_count}"
        for count_name, actual_count, expected_count in compared_counts
        if actual_count != expected_count
    ]
