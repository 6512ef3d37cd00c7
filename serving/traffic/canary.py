"""Canary: selection of the requests that it answers, and counts of both arms, in bounded memory."""

import math
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import xxhash
from prometheus_client import CollectorRegistry, Counter, Summary

from cache.store.releases import Canary
from cache.traffic.key_sketch import KeySketch
from cache.traffic.split import KeySplit
from serving.engine.rendering.answer_fields import AnswerJson
from serving.engine.service import LookupService, RoutedRequest
from serving.generations.holder import GenerationHolder
from serving.generations.served_set import ServedGenerations
from serving.requests.answers import FALLBACK_SOURCES, Source
from serving.requests.models import RequestedEntity
from serving.requests.options import RequestOptions

Arm = Literal["live", "canary"]

ARMS: tuple[Arm, ...] = ("live", "canary")

COUNTED_EVENTS_MAX = 16
"""Number of kinds of feedback that are counted separately; further kinds count as `other`."""

OTHER_EVENT = "other"

SAMPLED_KEYS_MAX = 8_192
"""Largest number of sampled keys per arm, about 2 MB; the sample keeps at least half as many."""

_SAMPLE_SEED = 0x6B657973
"""Hash seed that differs from the split's, so that the sample is independent of the arm."""

_STEPS_PER_OCTAVE = 8

_OCTAVES = 16

_MIDDLE_BUCKET = _OCTAVES * _STEPS_PER_OCTAVE


@lru_cache(maxsize=16)
def canary_split(canary: Canary) -> KeySplit:
    """Return the share of the keys that a canary answers."""
    return KeySplit.of(canary.generation, canary.percent)


class CanaryAssignment(NamedTuple):
    """Assignment of a request: the arm that answers it, the key that determined the arm, and the canary."""

    arm: Arm
    assignment_key: bytes
    canary: Canary


class CanaryMetrics:
    """Counts of requests by the arms of a canary."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "larder_canary_requests",
            "Requests while a canary runs, by arm, or by the reason for no arm",
            ["arm"],
            registry=registry,
        )
        self.answers = Counter(
            "larder_canary_answers",
            "Entities answered by source, while a canary runs",
            ["arm", "source"],
            registry=registry,
        )
        self.top_score = Summary("larder_canary_top_score", "Top score of each list", ["arm"], registry=registry)
        self.feedback = Counter("larder_feedback", "Feedback by arm", ["arm", "event"], registry=registry)


class CanaryRouter:
    """Router of requests by the caller's key alone, so that all replicas choose the same generation for a request."""

    def __init__(self, holder: GenerationHolder, metrics: CanaryMetrics) -> None:
        self._holder = holder
        self._metrics = metrics
        self._counted_canary: Canary | None = None
        self._counts_by_arm: dict[Arm, ArmCounts] = {}
        self._event_names = EventNames()

    def route(
        self, served: ServedGenerations, entities: Sequence[RequestedEntity], options: RequestOptions
    ) -> tuple[ServedGenerations, CanaryAssignment | None]:
        """Return the generations that answer the request, and its assignment; None if it is in neither arm."""
        if (canary := self._holder.canary) is None:
            return served, None
        if options.generation is not None:
            return self._without_arm(served, "pinned")
        key = assignment_key(served, entities, options)
        if key is None:
            return self._without_arm(served, "no_key")
        if served.canary is None or served.next is None:
            return self._without_arm(served, "not_held")
        self._begin_counts(canary)
        if canary_split(served.canary).has_key(key):
            return served.for_canary(served.next), CanaryAssignment("canary", key, canary)
        return served, CanaryAssignment("live", key, canary)

    @property
    def has_canary(self) -> bool:
        """True while a canary runs."""
        return self._holder.canary is not None

    def finish(self, assignment: CanaryAssignment, answers: Sequence[AnswerJson], is_of_candidates: bool) -> None:
        """Count the answers of a request; scores of items that the caller chose are ignored."""
        if is_of_candidates:
            answers = [{"source": answer["source"]} for answer in answers]
        self.count(assignment, answers)

    def count(self, assignment: CanaryAssignment | None, answers: Sequence[AnswerJson]) -> None:
        """Count an answered request of one arm.

        A request that was routed under another canary or share is not counted for the current canary.
        """
        if assignment is None:
            return
        arm, key, canary = assignment
        self._metrics.requests.labels(arm).inc()
        for answer in answers:
            self._metrics.answers.labels(arm, answer["source"]).inc()
        if canary != self._counted_canary:
            return
        for top_score in self._counts_by_arm[arm].count_answers(key, answers):
            self._metrics.top_score.labels(arm).observe(top_score)

    def count_feedback(
        self,
        served: ServedGenerations,
        generation: str | None,
        assignment_key: bytes | None,
        event_name: str,
        event_count: int,
    ) -> Arm | None:
        """Count feedback for a generation or a key; return the arm, None if it belongs to neither arm."""
        canary = self._holder.canary
        if canary is None or served.canary is None:
            return None
        self._begin_counts(canary)
        if generation is not None:
            arm_by_generation: dict[str, Arm] = {served.live.generation: "live", canary.generation: "canary"}
            arm = arm_by_generation.get(generation)
        else:
            arm = (
                "canary"
                if assignment_key is not None and canary_split(served.canary).has_key(assignment_key)
                else "live"
            )
        if arm is not None:
            self._counts_by_arm[arm].count_feedback(event_name, event_count)
            self._metrics.feedback.labels(arm, self._event_names.counted_name(event_name, canary.event)).inc(
                event_count
            )
        return arm

    def report(self) -> dict[str, Any] | None:
        """Return the counts of both arms for the heartbeat; None while no canary runs."""
        if (canary := self._holder.canary) is None:
            return None
        self._begin_counts(canary)
        return {
            "generation": canary.generation,
            "percent": canary.percent,
            "since": canary.since,
            "arms": {arm: counts.to_json() for arm, counts in self._counts_by_arm.items()},
        }

    def _begin_counts(self, canary: Canary) -> None:
        if canary != self._counted_canary:  # another canary or share: earlier counts are not comparable
            self._counted_canary, self._counts_by_arm = (canary, {arm: ArmCounts(canary.event) for arm in ARMS})

    def _without_arm(self, served: ServedGenerations, no_arm_reason: str) -> tuple[ServedGenerations, None]:
        self._metrics.requests.labels(no_arm_reason).inc()
        return served, None


class CanaryRouters:
    """Canary routers by namespace, as long as the namespace is held."""

    def __init__(self) -> None:
        self._router_by_holder: WeakKeyDictionary[GenerationHolder, CanaryRouter] = WeakKeyDictionary()

    def add(self, holder: GenerationHolder, router: CanaryRouter) -> None:
        """Add the router of a namespace."""
        self._router_by_holder[holder] = router

    def of(self, service: LookupService) -> CanaryRouter:
        """Return the router of the namespace that a service answers from."""
        return self._router_by_holder[service.follower.holder]

    def route_request(
        self, routed: RoutedRequest, entities: Sequence[RequestedEntity], options: RequestOptions
    ) -> RoutedRequest:
        """Send a request to the live generation or the canary of the namespace that answers it."""
        router = self._router_by_holder[routed.service.follower.holder]
        if not router.has_canary:
            return routed
        served, assignment = router.route(routed.capture_served(), entities, options)
        if assignment is None:
            return routed._replace(served=served)
        finisher = partial(router.finish, assignment)
        return routed._replace(served=served, finishers=(finisher, *routed.finishers))


def assignment_key(
    served: ServedGenerations, entities: Sequence[RequestedEntity], options: RequestOptions
) -> bytes | None:
    """Return the key that assigns a request: the caller's key, else the only user of the request."""
    if options.canary_key is not None:
        return options.canary_key
    if len(entities) != 1:
        return None
    table = served.live.manifest.tables.get(entities[0].table)
    return entities[0].raw_id if table is not None and table.entity == "user" else None


class EventNames:
    """Kinds of feedback counted separately: the first `COUNTED_EVENTS_MAX`, and a given one; others are `other`."""

    def __init__(self) -> None:
        self._counted_event_names: set[str] = set()

    def counted_name(self, event_name: str, always_counted_event: str = "") -> str:
        """Return the name under which an event is counted; the canary's deciding event always has its own."""
        if event_name not in self._counted_event_names and (
            len(self._counted_event_names) < COUNTED_EVENTS_MAX or event_name == always_counted_event != ""
        ):
            self._counted_event_names.add(event_name)
        return event_name if event_name in self._counted_event_names else OTHER_EVENT


class _FirstAnswer(NamedTuple):
    answer_kind: str
    top_score: float | None
    score_bucket: int | None


@dataclass(slots=True, eq=False)
class KeySample:
    """Uniform sample of the keys of one arm, each with its first answer.

    Traffic is split by key, so each key counts once, by its first answer; otherwise a few busy keys would dominate.
    Beyond `sampled_keys_max` keys a uniform sample is kept (Wegman's adaptive sampling, as analysed by Flajolet, "On
    adaptive sampling", 1990): keys whose hash ends in `sampling_level` zero bits, where `sampling_level` grows whenever
    there are too many. `sketch` counts all keys.
    """

    sampled_keys_max: int = SAMPLED_KEYS_MAX
    sampling_level: int = 0
    count_by_kind: Tally[str] = field(default_factory=Tally)
    count_by_score_bucket: Tally[int] = field(default_factory=Tally)
    top_score_sum: float = 0.0
    sketch: KeySketch = field(default_factory=KeySketch)
    _first_answer_by_key: dict[int, _FirstAnswer] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._first_answer_by_key)

    def add_answer(self, assignment_key: bytes, answer_kind: str, top_score: float | None) -> None:
        """Add an answer to a key; only the key's first answer counts."""
        key_hash = xxhash.xxh3_64_intdigest(assignment_key, _SAMPLE_SEED)
        if key_hash in self._first_answer_by_key:
            return
        self.sketch.add(key_hash)
        if key_hash & ((1 << self.sampling_level) - 1):
            return
        first_answer = self._first_answer_by_key[key_hash] = _FirstAnswer(
            answer_kind, top_score, None if top_score is None else bucket_of_score(top_score)
        )
        self.count_by_kind[answer_kind] += 1
        if first_answer.top_score is not None and first_answer.score_bucket is not None:
            self.count_by_score_bucket[first_answer.score_bucket] += 1
            self.top_score_sum += first_answer.top_score
        if len(self._first_answer_by_key) > self.sampled_keys_max:
            self._halve()

    def _halve(self) -> None:
        while len(self._first_answer_by_key) > self.sampled_keys_max:
            self.sampling_level += 1
            low_bits = (1 << self.sampling_level) - 1
            self._first_answer_by_key = {
                key_hash: first_answer
                for key_hash, first_answer in self._first_answer_by_key.items()
                if not key_hash & low_bits
            }
        first_answers = self._first_answer_by_key.values()
        self.count_by_kind = Tally([first_answer.answer_kind for first_answer in first_answers])
        self.count_by_score_bucket = Tally(
            [first_answer.score_bucket for first_answer in first_answers if first_answer.score_bucket is not None]
        )
        self.top_score_sum = sum(
            first_answer.top_score for first_answer in first_answers if first_answer.top_score is not None
        )


@dataclass(slots=True, eq=False)
class ArmCounts:
    """Counts of one arm since its canary began; feedback called `deciding_event` always has its own count."""

    deciding_event: str = ""
    request_count: int = 0
    feedback_count_by_event: Tally[str] = field(default_factory=Tally)
    keys: KeySample = field(default_factory=KeySample)

    def count_answers(self, assignment_key: bytes, answers: Sequence[Mapping[str, Any]]) -> list[float]:
        """Count one more request; return the top scores of the lists that come from this arm's generation."""
        self.request_count += 1
        if answers:
            self.keys.add_answer(assignment_key, _answer_kind(answers[0]), _top_score_of(answers[0]))
        return [top_score for answer in answers if (top_score := _top_score_of(answer)) is not None]

    def count_feedback(self, event_name: str, event_count: int) -> None:
        """Count feedback; kinds beyond `COUNTED_EVENTS_MAX` are counted as `other`."""
        other_count = len(self.feedback_count_by_event) - (self.deciding_event in self.feedback_count_by_event)
        if (
            event_name not in self.feedback_count_by_event
            and event_name != self.deciding_event
            and other_count >= COUNTED_EVENTS_MAX
        ):
            event_name = OTHER_EVENT
        self.feedback_count_by_event[event_name] += event_count

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object for the heartbeat; buckets are texts, since they are keys.

        `keys` is the number of kept keys, each of which represents `weight` keys; sketches of replicas can be merged.
        """
        return {
            "requests": self.request_count,
            "keys": len(self.keys),
            "weight": 1 << self.keys.sampling_level,
            "sketch": self.keys.sketch.to_text(),
            "kinds": dict(self.keys.count_by_kind),
            "scores": {
                str(score_bucket): count for score_bucket, count in sorted(self.keys.count_by_score_bucket.items())
            },
            "score_sum": self.keys.top_score_sum,
            "feedback": dict(self.feedback_count_by_event),
        }


def _answer_kind(answer: Mapping[str, Any]) -> str:
    """Return the kind of an answer; L1 and L2 are the same kind, since they say nothing about the generation.

    An answer that counts newer events of the user is `stored`: a generation that was made later has them in records.
    """
    source = Source(answer["source"])
    if source in FALLBACK_SOURCES:
        return source.value
    if "events" in answer:
        return "stored"
    return "live" if source is Source.LIVE or answer.get("producer") == "live" else "stored"


def _top_score_of(answer: Mapping[str, Any]) -> float | None:
    scores = answer.get("scores")
    if scores is None or not len(scores) or answer["source"] in FALLBACK_SOURCES:
        return None
    return float(scores[0])


def bucket_of_score(top_score: float) -> int:
    """Return a bucket number that grows with the score: eighths of an octave (9 %), 2**-16 to 2**16, both signs."""
    magnitude = min(abs(top_score), 2.0**_OCTAVES)
    if magnitude < 2.0**-_OCTAVES:
        return 0
    bucket_step = min(math.floor(math.log2(magnitude) * _STEPS_PER_OCTAVE) + _MIDDLE_BUCKET, 2 * _MIDDLE_BUCKET - 1) + 1
    return bucket_step if top_score > 0 else -bucket_step
