"""Invariants of every answer that a caller can check."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from serving.client import Unanswered
from serving.requests.answers import STORED_SOURCES, Source

VIOLATIONS_MAX = 20
"""Violations reported in full; further ones are only counted."""


class InvariantViolation(RuntimeError):
    """An invariant does not hold; the message says which."""


@contextmanager
def translate_errors(subject: str) -> Iterator[None]:
    """Raise InvariantViolation for an answer of an unexpected form, which ends the demo."""
    try:
        yield
    except (Unanswered, ValueError) as error:
        raise InvariantViolation(f"{subject}: {error}") from error


@dataclass(frozen=True, slots=True)
class Question:
    """Entity of a request, with all items that its answer must not contain."""

    table: str
    id: str | None
    k: int | None = None
    hidden: frozenset[str] = frozenset()


@dataclass(slots=True)
class Judge:
    """Judge that counts answers by source and records violations; `rolled_back_generations` must no longer answer."""

    rolled_back_generations: set[str] = field(default_factory=set)
    histories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    generations: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    entities: int = 0
    broken: int = 0
    violations: list[str] = field(default_factory=list)
    _lists: dict[tuple[str, str, str], tuple[str, ...]] = field(default_factory=dict)

    def complain(self, violation: str) -> None:
        """Record a violation of one rule."""
        self.broken += 1
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(violation)

    def published(self, generations: Collection[str]) -> None:
        """Check that each answer came from one of these generations; call it once all answers are in."""
        for stranger in sorted(set(self.generations) - set(generations)):
            self.complain(
                f"{self.generations[stranger]} answers from {stranger}, which never was live"
            )

    def request(
        self,
        questions: Sequence[Question],
        answers: Sequence[Mapping[str, Any]],
        rolled_back_generations: Iterable[str] = (),
    ) -> None:
        """Judge one answered request; `rolled_back_generations` are those that were rolled back when it was sent."""
        self.requests += 1
        self.entities += len(questions)
        if len(answers) != len(questions):
            self.complain(f"{len(questions)} entities asked, {len(answers)} answered")
        asked_of = {
            entity_answer.get("generation")
            for entity_answer in answers
            if entity_answer.get("source") != "previous"
        }
        if len(asked_of) > 1:
            self.complain(
                f"one request, answers of several generations: {sorted(map(str, asked_of))}"
            )
        for question, answer in zip(questions, answers, strict=False):
            self._answer(question, answer, set(rolled_back_generations))

    def _answer(
        self, question: Question, answer: Mapping[str, Any], rolled_back_generations: set[str]
    ) -> None:
        source, generation = answer.get("source"), str(answer.get("generation"))
        where = f"{question.table}/{question.id}: "
        if source not in set(Source):
            self.complain(f"{where}source {source!r}")
            return
        self.sources[source] += 1
        self.generations[generation] += 1
        if generation in rolled_back_generations:
            self.complain(f"{where}answered from {generation} after it was rolled back")
        if answer.get("id") != question.id:
            self.complain(f"{where}got the answer of {answer.get('id')!r}")
        if source not in STORED_SOURCES and not answer.get("reason"):
            self.complain(f"{where}source {source} without a reason")
        if "items" in answer:
            self._items(where, question, answer, source, generation)

    def _items(
        self,
        where: str,
        question: Question,
        answer: Mapping[str, Any],
        source: str,
        generation: str,
    ) -> None:
        items, scores = tuple(answer["items"]), answer["scores"]
        if len(items) != len(scores) or len(set(items)) != len(items):
            self.complain(f"{where}{len(items)} items, {len(scores)} scores, or an item twice")
        if any(preceding_score < two for preceding_score, two in itertools.pairwise(scores)):
            self.complain(f"{where}scores are not in order")
        short = answer.get("short")
        if question.k is not None and (
            len(items) > question.k or (len(items) < question.k) != short
        ):
            self.complain(f"{where}{len(items)} of {question.k} items, short = {short}")
        if back := question.hidden.intersection(items):
            self.complain(f"{where}{sorted(back)[:3]} came back although it was sent or excluded")
        if question.id is None or answer.get("producer") != "batch":
            return
        history = self.histories.get(question.id, ()) if question.table == "user_topk" else ()
        if back := frozenset(history).intersection(items):
            self.complain(f"{where}{sorted(back)[:3]} is in the user's own history")
        # A generation is immutable: the same plain question has the same answer, from any tier, at any time.
        if not question.hidden and source in STORED_SOURCES:
            key = (generation, question.table, question.id)
            first = self._lists.setdefault(key, items)
            shared = min(len(first), len(items))
            if first[:shared] != items[:shared]:
                self.complain(f"{where}two different answers within {generation}")
            if len(items) > len(first):
                self._lists[key] = items
