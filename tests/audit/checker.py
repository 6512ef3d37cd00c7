"""Judges answers of the service by the documents alone, against the reference."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from tests.audit.client import Client, Reply
from tests.audit.filters import EVERYTHING, passes
from tests.audit.reference import Event, Generation, Input, Ranked, UserView, day_of, dot, user_view
from tests.audit.report import Report
from tests.audit.reranks import complaint
from tests.audit.values import Json, Vector

LATE_S = 2.5
"""Seconds for which a replica may lag behind a change: one that the documents allow, and more on busy cores."""

API = "docs/reference/http-api.md"
FILTERS = "docs/how-to/filter-answers.md"

_CHANGES_KEPT = 16
"""Number of changes that a recipe names."""

_REDIS_AWAY = {"l2_down", "breaker_open", "l2_timeout"}
"""Reasons of an answer for which no stored record could be read."""

_READS_MAX = 5
"""Reads of the catalogue at most, until two in a row are equal."""

PROMISES = {
    "echo": f"{API}: `id`: Requested id; `table`: Requested table",
    "generation": f"{API}: Generation that the whole answer is from",
    "one generation": "README: An answer is never a mixture of two nights",
    "pin": f"{API}: `generation=` pins a generation while a replica offers it",
    "banned": f"{API}: Items in the sent history, in `exclude` or on the blocklist never appear",
    "had": f"{API}: What a user had by the night is in no list of a known user",
    "list": f"{API}: A user with events ... is answered from the night's input and those events; "
    "an id with a record is answered from that record; the best first",
    "order": f"{API}: Items of one score stand in the order of the generation's catalogue, the same for every source",
    "score": f"{API}: Scores of the items",
    "filter": f"{FILTERS}: So the answer is the best of what passes",
    "passes": f"{API}: With a `filter`, only items that pass it appear",
    "short": f"{API}: Fewer than k remain; under a filter: fewer than k pass",
    "events": f"{API}: `events`: Number of the user's counted events that are newer than the generation",
    "approximate": f"{API}: the list that a night with them would publish, or `approximate`",
    "source": f"{API}: Rung of the ladder that answered; `producer`: what computed it",
    "reason": f"{API}: A `reason` is one of these words",
    "live": f"{API}: `live` says why the model did not answer although there was something to compute from",
    "rerank": "docs/how-to/re-rank-answers.md: Boosts come first, then `diversify`, then the first k are taken",
    "reranked": "docs/how-to/re-rank-answers.md: The answer says what was done",
    "vector": f"{API}: Embedding; null: none",
    "values": f"{API}: Model outputs; null: none",
    "defaults": f"{API}: Defaults are the items with the most interactions",
    "facet": f"{FILTERS}: the 100 best items whose `category` is ...; they have the order of the defaults",
    "similar": f"{API}: `item_similar`: lists of items by an item's vector",
    "score route": f"{API}: `/v1/score` ranks by the stored user vector, so as the night ranked",
    "explain": "docs/how-to/find-out-why.md: `explain` says which source would answer, and why no earlier one does",
    "stale": f"{API}: Why this replica may lag behind",
    "dropped": f"{API}: History ids the model does not know",
    "status": f"{API}: never an error",
    "metrics": "docs/how-to/watch-a-service.md: answers by source, misses by reason",
}


@dataclass(frozen=True)
class EntityLookup:
    """One entity of one table, with the options of its request."""

    table: str
    entity: Input
    k: int | None = None
    filter: Json | str | None = None
    exclude: tuple[str, ...] = ()
    rerank: Json | str | None = None
    stored_only: bool = False
    """Whether `max_events=0` is sent."""
    fresh: bool = False
    generation: str | None = None
    canary_key: str | None = None
    arm: str | None = None

    def options(self) -> Json:
        """Return the options as a body has them."""
        options: Json = {}
        for name in ("k", "filter", "rerank", "generation", "canary_key", "arm"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        if self.exclude:
            options["exclude"] = list(self.exclude)
        if self.stored_only:
            options["max_events"] = 0
        if self.fresh:
            options["fresh"] = True
        return options


@dataclass
class Knowledge:
    """What an auditor knows of the site at one moment."""

    generations: dict[str, Generation] = field(default_factory=dict)
    allowed: set[str] = field(default_factory=set)
    """Generations that may answer a request without a pin."""
    events: list[Event] = field(default_factory=list)
    blocked_items: set[str] = field(default_factory=set)
    blocked_users: set[str] = field(default_factory=set)
    erased_items: set[str] = field(default_factory=set)
    event_index_by_new_item: dict[str, int] = field(default_factory=dict)
    """Index of the newest event that brought each new item."""
    reranks: dict[str, Json] = field(default_factory=dict)
    exact_live: bool = True
    """Whether live lists are exact: models in fp32 and a flat index."""
    impaired: bool = False
    """Whether Redis is away or lost pages: later rungs of the ladder may answer."""
    events_away: bool = False
    """Whether the Redis of events is away: answers may say that they lack some."""
    order: list[str] = field(default_factory=list)
    """Items as the catalogue has them, also those that are blocked since they were seen."""
    guessed_places: set[str] = field(default_factory=set)
    """Items that were blocked when the order was read: between their neighbours of earlier, new items may stand."""
    unblocked_items: set[str] = field(default_factory=set)
    """Items that were blocked once: live answers that were stored meanwhile lack them."""
    changed_at: float = 0.0
    catalogue_reads: int = 0
    """Reads of a catalogue's order so far."""
    stored_inputs: dict[tuple[str, str], list[Input]] = field(default_factory=dict)
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Answers by table and source, as `/metrics` has to count them."""
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Reasons by table, of answers for which no stored record was read."""
    with_events: Counter[str] = field(default_factory=Counter)

    changes: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_CHANGES_KEPT))
    """Times (monotonic) and texts of the last changes, oldest first."""

    def change(self, description: str = "another change") -> None:
        """Note that something changed just now: replicas may lag for a moment."""
        self.changed_at = time.monotonic()
        self.changes.append((self.changed_at, description))

    def recent_changes(self) -> list[str]:
        """Return the last changes with their ages, as lines of a recipe."""
        now_s = time.monotonic()
        return [f"{now_s - changed_at:.1f} s ago: {description}" for changed_at, description in self.changes]

    def is_settled(self) -> bool:
        """Return whether every replica has to have followed the last change."""
        return time.monotonic() - self.changed_at > LATE_S


Complaint = tuple[str, object, object]
"""Rule, what was expected, what was seen."""


def _as_sent(view: UserView, generation: Generation, sent_input: Input) -> UserView:
    """Return the view of a user who is answered from what a request sends, although the night knows them."""
    sent_view = user_view(generation, Input(None, sent_input.history, sent_input.country), [])
    return replace(
        view,
        vector=sent_view.vector,
        mood=sent_view.mood,
        events=0,
        brings_vector=False,
        is_live=True,
        is_fallback=False,
    )


@dataclass
class Checker:
    """Sends requests, judges the answers, and records violations in a report."""

    knowledge: Knowledge
    report: Report

    def judge_lookups(self, client: Client, *asks: EntityLookup, route: str = "lookup") -> list[Json]:
        """Send lookups with equal options as one request and judge the answers; repeat it while changes spread."""
        while True:
            settled = self.knowledge.is_settled()
            reply = self._send(client, asks, route)
            complaints, answers = self.judge_reply(asks, reply)
            if not complaints:
                break
            if settled:
                recipe = [*self.knowledge.recent_changes(), *client.recent[-12:]]
                for rule, expected, observed in complaints:
                    self.report.violate(rule, PROMISES[rule], expected, observed, recipe)
                break
            self.report.count("second looks while a change travels")
            time.sleep(0.05)
        self.report.count("answers", len(answers))
        self.report.count("requests")
        return answers

    def _send(self, client: Client, asks: tuple[EntityLookup, ...], route: str) -> Reply:
        first = asks[0]
        options = first.options()
        if route == "get":
            return client.lookup_one(first.table, first.entity.id or "", **options)
        if route == "tables":
            entities = []
            for lookup in asks:
                body = lookup.entity.body()
                entities.append({"table": lookup.table, **(body if isinstance(body, dict) else {"id": body})})
            return client.send("POST", "/v1/lookup", {"entities": entities, **options})
        return client.lookup(first.table, [lookup.entity.body() for lookup in asks], **options)

    def judge_reply(self, asks: tuple[EntityLookup, ...], reply: Reply) -> tuple[list[Complaint], list[Json]]:
        """Judge a whole reply."""
        if reply.status != 200 or not isinstance(reply.body, dict):
            return [("status", 200, {"status": reply.status, "body": reply.body})], []
        answers = reply.body.get("answers", [reply.body])
        for answer in answers:
            self.knowledge.answered[answer["table"], answer["source"]] += 1
            if "reason" in answer and answer["source"] not in ("l1", "l2"):
                self.knowledge.reasons[answer["table"], answer["reason"]] += 1
            if "events" in answer:
                self.knowledge.with_events[answer["table"]] += 1
        if len(answers) != len(asks):
            return [("status", f"{len(asks)} answers", len(answers))], answers
        complaints: list[Complaint] = []
        ids = {answer["generation"] for answer in answers if answer["source"] != "previous"}
        if len(ids) > 1:
            complaints.append(("one generation", "one", [answer["generation"] for answer in answers]))
        for lookup, answer in zip(asks, answers, strict=True):
            complaints += self.judge(lookup, answer)
        return complaints, answers

    def judge(self, lookup: EntityLookup, answer: Json) -> list[Complaint]:
        """Judge one answer; return what is wrong with it."""
        know = self.knowledge
        wrong: list[Complaint] = []
        self.report.count("judged")
        if answer.get("id") != lookup.entity.id or answer.get("table") != lookup.table:
            wrong.append(("echo", [lookup.entity.id, lookup.table], [answer.get("id"), answer.get("table")]))
        if answer.get("stale") and not know.impaired and not know.events_away and know.is_settled():
            wrong.append(("stale", "no `stale`", answer["stale"]))
        id_ = answer["generation"]
        if lookup.generation is not None:
            if id_ != lookup.generation:
                return [*wrong, ("pin", lookup.generation, id_)]
        elif id_ not in know.allowed and answer["source"] != "previous":
            return [*wrong, ("generation", sorted(know.allowed), id_)]
        generation = know.generations.get(id_)
        if generation is None:
            return [*wrong, ("generation", "a generation that was made", id_)]
        if answer["source"] == "previous" and not know.impaired:
            live = [know.generations[generation_id] for generation_id in know.allowed]
            views = [
                user_view(live_generation, lookup.entity, self._events(live_generation, stored_only=lookup.stored_only))
                for live_generation in live
            ]
            if any(view.has_record or view.vector is not None for view in views if lookup.table != "mood"):
                wrong.append(("source", "not the previous generation: the live one has a record", answer))
            listed_had_items = {item for view in views for item in view.history_items} & set(answer.get("items", ()))
            if listed_had_items:
                wrong.append(("had", sorted(listed_had_items), answer))
        judges = {
            "user_topk": self._judge_user_list,
            "user_vector": self._judge_user_vector,
            "mood": self._judge_mood,
            "item_vector": self._judge_item_vector,
            "item_similar": self._judge_similar,
        }
        judge = judges.get(lookup.table, self._judge_facet)
        self.report.count(f"table {lookup.table}")
        self.report.count(f"source {answer['source']}")
        if "reason" in answer:
            self.report.count(f"reason {answer['reason']}")
        return [*wrong, *judge(lookup, answer, generation)]

    # Views

    def _events(self, generation: Generation, *, stored_only: bool = False) -> list[Event]:
        """Return the night's events, and the later ones that count: none of users' on items that were erased."""
        return [
            event
            for event_index, event in enumerate(self.knowledge.events)
            if event_index < generation.events
            or event.user is None
            or not (stored_only or event.item in self.knowledge.erased_items)
        ]

    def _banned(self, lookup: EntityLookup, generation: Generation) -> set[str]:
        return (
            self.knowledge.blocked_items
            | set(lookup.exclude)
            | set(lookup.entity.history or ())
            | set(generation.erased_items)
        )

    def _filter(self, lookup: EntityLookup, generation: Generation) -> Json | None:
        if isinstance(lookup.filter, str):
            return generation.rules.filters[lookup.filter]
        return lookup.filter

    # Lists of users

    def _judge_user_list(self, lookup: EntityLookup, answer: Json, generation: Generation) -> list[Complaint]:
        know = self.knowledge
        user = lookup.entity
        view = user_view(generation, user, self._events(generation, stored_only=lookup.stored_only))
        wrong: list[Complaint] = []
        if user.id in know.blocked_users:
            if answer.get("reason") != "entity_blocked":
                wrong.append(("reason", "entity_blocked", answer))
            view = UserView(None, None, frozenset(), frozenset(), view.sent_items, 0, False, False, False)
            return wrong + self._judge_defaults(lookup, answer, generation, view)
        if user.is_sent and user.id is not None:
            know.stored_inputs.setdefault((generation.id, user.id), []).append(user)
        if user.id is not None and answer["source"] != "previous":
            wrong += self._judge_events(answer, view)
        if answer["source"] == "default":
            if view.vector is not None and not know.impaired:
                wrong.append(("source", "not the defaults: there is something to compute from", answer))
            return (
                wrong
                + self._judge_default_words(lookup, answer, view)
                + self._judge_defaults(lookup, answer, generation, view)
            )
        if answer["source"] == "previous":
            # Of a record: what was sent, and later events, only leave items out.
            view = user_view(generation, replace(user, country=None), know.events[: generation.events])
            if view.vector is None:
                return [*wrong, ("source", "default: the previous night had no list either", answer)]
            return wrong + self._judge_ranked(lookup, answer, generation, self._with_live_items(lookup, view))
        if lookup.fresh and user.is_sent and user.country is None and view.has_record and not view.events:
            if (answer.get("reason"), answer.get("live")) != ("fresh_unavailable", "no_usable_input"):
                wrong.append(("reason", "fresh_unavailable, no_usable_input", answer))
        elif lookup.fresh and user.is_sent and view.has_record and not view.events:
            view = _as_sent(view, generation, user)
            if (answer["source"], answer.get("reason")) != ("live", "fresh") and not know.impaired:
                wrong.append(("reason", "live, fresh", answer))
        elif view.vector is None:
            stored_inputs = know.stored_inputs.get((generation.id, user.id or ""), [])
            if answer["producer"] == "live" and stored_inputs:
                views = [
                    user_view(generation, stored_input, self._events(generation, stored_only=lookup.stored_only))
                    for stored_input in stored_inputs
                ]
                tries = [
                    self._judge_ranked(lookup, answer, generation, stored_view)
                    for stored_view in views
                    if stored_view.vector is not None
                ]
                if any(not complaints for complaints in tries):
                    return wrong
            return [*wrong, ("source", "default, as nothing is known to compute from", answer)]
        else:
            wrong += self._judge_personal_words(lookup, answer, view)
        complaints = self._judge_ranked(lookup, answer, generation, view)
        if complaints and know.impaired and answer["producer"] == "live" and answer.get("reason") in _REDIS_AWAY:
            # On a miss, a known user is answered from what is sent, now or a moment ago, as anybody is.
            for sent_input in know.stored_inputs.get((generation.id, user.id or ""), []):
                sent_view = _as_sent(view, generation, sent_input)
                if sent_view.vector is not None and not self._judge_ranked(lookup, answer, generation, sent_view):
                    return wrong
        return wrong + complaints

    def _with_live_items(self, lookup: EntityLookup, view: UserView) -> UserView:
        """Return the view of a previous night, whose list is cut without what the user had by that night alone."""
        live_items: frozenset[str] = frozenset()
        for generation_id in self.knowledge.allowed:
            live = self.knowledge.generations[generation_id]
            live_items |= user_view(
                live, lookup.entity, self._events(live, stored_only=lookup.stored_only)
            ).history_items
        later_items = live_items - view.history_items
        return replace(view, history_items=view.history_items | live_items, recent=view.recent | later_items)

    def _judge_events(self, answer: Json, view: UserView) -> list[Complaint]:
        wrong: list[Complaint] = []
        if answer.get("events", 0) != view.events:
            wrong.append(("events", view.events, answer))
        if view.events and "as_of" not in answer:
            wrong.append(("events", "`as_of`, as events are counted", answer))
        return wrong

    def _judge_default_words(self, lookup: EntityLookup, answer: Json, view: UserView) -> list[Complaint]:
        if self.knowledge.impaired:
            return []
        wrong: list[Complaint] = []
        if answer["producer"] != "defaults" or answer.get("reason") != "not_in_generation":
            wrong.append(("reason", "producer defaults, reason not_in_generation", answer))
        if (lookup.entity.is_sent or view.events) and answer.get("live") != "no_usable_input":
            wrong.append(("live", "no_usable_input", answer))
        return wrong

    def _judge_personal_words(self, lookup: EntityLookup, answer: Json, view: UserView) -> list[Complaint]:
        if self.knowledge.impaired:
            return []
        source, producer, reason = answer["source"], answer["producer"], answer.get("reason")
        origin_fields = (source, producer, reason)
        tight = bool(lookup.exclude or lookup.entity.history or lookup.filter)
        is_stored = source in ("l1", "l2")
        if view.is_fallback:
            right = is_stored and producer == "batch" and answer.get("live") == "no_usable_input"
            right = right and answer.get("approximate") is True
            expected = "the stored list, live no_usable_input, approximate"
        elif view.events and not view.brings_vector:
            right = (is_stored and producer == "live" and reason is None) or (
                source == "live"
                and producer == "live"
                and reason in {"newer_events", *({"exhausted"} if tight else ()), *({"fresh"} if lookup.fresh else ())}
            )
            expected = "live with newer_events, or stored by live"
        elif view.has_record:
            right = is_stored and producer == "batch" and reason is None
            expected = "l1 or l2, producer batch, no reason"
            if view.brings_vector and view.events:
                right = right or (source == "live" and reason == "newer_events") or producer == "live"
            if lookup.fresh and not lookup.entity.is_sent:
                right = is_stored and reason == "nothing_to_compute_from"
                expected = "l1 or l2, reason nothing_to_compute_from"
            elif lookup.fresh:
                right = True
        else:
            reasons = {"not_in_generation", "input_changed", "expired"} | ({"exhausted"} if tight else set())
            reasons |= {"newer_events"} if view.events else set()
            reasons |= {"fresh"} if lookup.fresh else set()
            right = producer == "live" and ((source == "live" and reason in reasons) or (is_stored and reason is None))
            expected = f"live with one of {sorted(reasons)}, or stored by live"
        return [] if right else [("source", expected, [origin_fields, answer])]

    def _judge_ranked(
        self, lookup: EntityLookup, answer: Json, generation: Generation, view: UserView
    ) -> list[Complaint]:
        """Judge a list that a vector of the user ranks."""
        assert view.vector is not None
        day = day_of(generation, self.knowledge.events)
        banned = self._banned(lookup, generation)
        expression = self._filter(lookup, generation)
        items, scores = answer["items"], answer["scores"]
        wrong = self._judge_items(lookup, items, scores, banned, view.history_items)
        if expression is not None:
            failing = [item for item in items if not passes(expression, day.attributes.get(item, {}))]
            if failing:
                wrong.append(("passes", expression, {"failing": failing, "answer": answer}))
        if wrong:
            return wrong
        complaints = self._judge_order(lookup, answer, generation, view, frozenset())
        if complaints and answer["producer"] == "live" and answer["source"] in ("l1", "l2"):
            absent_items = self.knowledge.unblocked_items - banned - view.history_items
            lacking = frozenset(absent_items - set(items))
            if lacking and not self._judge_order(lookup, answer, generation, view, lacking):
                return []
        return complaints

    def _judge_order(
        self, lookup: EntityLookup, answer: Json, generation: Generation, view: UserView, lacking: frozenset[str]
    ) -> list[Complaint]:
        """Judge the order of a list that was computed without the items that were blocked then."""
        day = day_of(generation, self.knowledge.events)
        expression = self._filter(lookup, generation)
        width = generation.rules.topk
        k = lookup.k or width
        assert view.vector is not None
        left_out = self._banned(lookup, generation) | view.history_items | lacking
        is_stored = view.is_stored
        marks_end = answer["items"] if answer["producer"] == "live" else ()
        night = dict(generation.items)
        everything = night if lookup.stored_only else night | day.new_items
        by_night = view.history_items - view.recent if is_stored else view.history_items | lacking
        ranked = generation.rank_by(view.vector, {i: v for i, v in night.items() if i not in by_night})
        base_night = [pair for pair in generation.cut(ranked, width, marks_end) if pair[1] not in left_out]
        ranked_all = generation.rank_by(view.vector, {i: v for i, v in everything.items() if i not in by_night})
        base_all = [pair for pair in generation.cut(ranked_all, width, marks_end) if pair[1] not in left_out]
        full_night = [pair for pair in ranked if pair[1] not in left_out]
        full_all = [pair for pair in ranked_all if pair[1] not in left_out]

        before_cut = [
            [
                pair
                for pair in generation.cut([p for p in all_ if p[1] not in sooner], width, marks_end)
                if pair[1] not in left_out
            ]
            for all_ in (ranked, ranked_all)
            for sooner in (view.sent_items, view.sent_items | self.knowledge.blocked_items)
        ]
        if lookup.rerank is not None:
            return self._judge_reranked(
                lookup,
                answer,
                generation,
                expression,
                [base_night, base_all, full_night[:width], full_all[:width], *before_cut],
                [full_night, full_all],
            )
        tries: list[tuple[Ranked, int, int, bool]] = []
        if expression is None:
            if is_stored:
                tries.append((base_night, min(k, len(base_night)), min(k, len(base_night)), len(base_night) < k))
                if (view.brings_vector or view.is_fallback) and view.events:
                    tries.append((full_night, min(k, len(base_night)), min(k, len(full_night)), len(full_night) < k))
            else:
                for base, full in ((base_all, full_all), *(((base_night, full_night),) if view.is_live else ())):
                    tries.append((full, min(k, len(base)), min(k, len(full)), len(full) < k))
            rule = "list"
        else:
            rule = "filter"
            passing_night = [pair for pair in full_night if passes(expression, day.attributes[pair[1]])]
            passing_all = [pair for pair in full_all if passes(expression, day.attributes[pair[1]])]
            of_base = [pair for pair in base_night if passes(expression, day.attributes[pair[1]])]
            if is_stored and len(of_base) >= k:
                tries.append((of_base, k, k, False))
            elif is_stored and isinstance(lookup.filter, str):
                tries.append(
                    (passing_night, min(k, len(passing_night)), min(k, len(passing_night)), len(passing_night) < k)
                )
                tries.append((passing_all, min(k, len(passing_all)), min(k, len(passing_all)), len(passing_all) < k))
            else:
                tries.append((passing_all, min(k, len(passing_all)), min(k, len(passing_all)), len(passing_all) < k))
            if is_stored and self._may_be_part(answer):
                tries.append((of_base, min(k, len(of_base)), min(k, len(of_base)), len(passing_all) < k))
        complaints: list[list[Complaint]] = []
        for ranking, count_min, count_max, short in tries:
            is_index = answer["source"] == "live" and expression is None
            complaint_list = self._compare(answer, ranking, count_min, count_max, k, short, rule, is_index)
            if not complaint_list:
                return []
            complaints.append(complaint_list)
        return complaints[0]

    def _may_be_part(self, answer: Json) -> bool:
        """Return whether a filtered list may be what passes of the stored one, although more items pass."""
        return answer["source"] == "previous" or (self.knowledge.impaired and answer.get("reason") == "filtered")

    def _judge_items(
        self, lookup: EntityLookup, items: list[str], scores: list[float], banned: set[str], had_items: Iterable[str]
    ) -> list[Complaint]:
        wrong: list[Complaint] = []
        if len(items) != len(scores) or len(set(items)) != len(items):
            wrong.append(("list", "as many scores as items, no item twice", [items, scores]))
        if lookup.k is not None and len(items) > lookup.k:
            wrong.append(("list", f"at most {lookup.k}", items))
        if banned & set(items):
            wrong.append(("banned", "none of these", sorted(banned & set(items))))
        if set(had_items) & set(items):
            wrong.append(("had", "none of these", sorted(set(had_items) & set(items))))
        return wrong

    def _compare(
        self,
        answer: Json,
        ranking: Ranked,
        count_min: int,
        count_max: int,
        k: int,
        short: bool,
        rule: str,
        loose_end: bool,
    ) -> list[Complaint]:
        items, scores = answer["items"], answer["scores"]
        count = len(items)
        expected = [item for _, item in ranking[:count_max]]
        exact = [float(np.float32(score)) for score, _ in ranking[:count]]
        if not count_min <= count <= count_max:
            return [(rule, {"count": [count_min, count_max], "items": expected}, answer)]
        if count < count_max:
            short = True
        if [float(np.float32(score)) for score in scores] != exact:
            return [("score" if items == expected[:count] else rule, {"items": expected, "scores": exact}, answer)]
        if items != expected[:count]:
            groups = {item: score for score, item in ranking}
            is_tie = all(
                item in groups and float(np.float32(groups[item])) == score
                for item, score in zip(items, exact, strict=True)
            )
            if not is_tie:
                return [(rule, {"items": expected}, answer)]
            last = exact[-1]
            differing_indexes = [index for index in range(count) if items[index] != expected[index]]
            at_end = all(exact[index] == last for index in differing_indexes)
            if not (loose_end and at_end):
                return [("order", {"items": expected}, answer)]
        if answer["short"] != (short if count < k else False):
            return [("short", {"short": short, "k": k, "count": count}, answer)]
        return []

    def _judge_reranked(
        self,
        lookup: EntityLookup,
        answer: Json,
        generation: Generation,
        expression: Json | None,
        bases: list[Ranked],
        fulls: list[Ranked],
    ) -> list[Complaint]:
        know = self.knowledge
        spec = know.reranks[lookup.rerank] if isinstance(lookup.rerank, str) else lookup.rerank
        assert spec is not None
        day = day_of(generation, know.events)
        vectors = generation.items | day.new_items
        width = generation.rules.topk
        k = lookup.k or width
        pools = list(bases)
        if expression is not None:
            pools = [[pair for pair in base if passes(expression, day.attributes[pair[1]])] for base in bases]
            wide = [[pair for pair in full if passes(expression, day.attributes[pair[1]])][:width] for full in fulls]
            if len(answer["items"]) < k and not self._may_be_part(answer):
                pools = wide
            else:
                pools += wide
        for full in list(pools):
            pools.append([pair for pair in full if pair[1] in generation.items])
        reasons = [complaint(pool, spec, day.attributes, vectors, k, answer["items"]) for pool in pools]
        wrong: list[Complaint] = []
        if all(reason is not None for reason in reasons):
            wrong.append(("rerank", {"spec": spec, "why": reasons[0], "candidates": pools[0]}, answer))
        scores = {item: score for pool in pools for score, item in pool}
        for item, score in zip(answer["items"], answer["scores"], strict=True):
            if item in scores and float(np.float32(scores[item])) != float(np.float32(score)):
                wrong.append(("score", scores[item], [item, score]))
                break
        names = "+".join(name for name in ("boost", "diversify") if name in spec)
        if answer.get("reranked") != names:
            wrong.append(("reranked", names, answer))
        if answer["short"] and len(answer["items"]) >= k:
            wrong.append(("short", False, answer))
        if not answer["short"] and len(answer["items"]) < k and expression is None and answer["source"] != "default":
            wrong.append(("short", True, answer))
        return wrong

    def _judge_defaults(
        self, lookup: EntityLookup, answer: Json, generation: Generation, view: UserView
    ) -> list[Complaint]:
        banned = self._banned(lookup, generation)
        items, scores = answer["items"], answer["scores"]
        wrong = self._judge_items(lookup, items, scores, banned, view.history_items)
        if wrong:
            return wrong
        day = day_of(generation, self.knowledge.events)
        expression = self._filter(lookup, generation)
        width = generation.rules.topk
        k = lookup.k or width
        popular = generation.popular()
        if len(popular) < width:
            unpopular = generation.rank({i: 0.0 for i in generation.items if not generation.counts[i]})
            popular = popular + unpopular
        left_out = banned | view.history_items
        base = [pair for pair in popular[:width] if pair[1] not in left_out]
        full = [pair for pair in popular if pair[1] not in left_out]
        if expression is not None:
            passing_items = [
                i for i in day.find_passing_items(expression) if i in generation.items and i not in left_out
            ]
            new = [
                i
                for i in day.find_passing_items(expression)
                if i in day.new_items and i not in left_out and not lookup.stored_only
            ]
            base = [pair for pair in base if passes(expression, day.attributes[pair[1]])]
            full = [pair for pair in full if passes(expression, day.attributes[pair[1]])]
            if lookup.rerank is None:
                wrong = self._compare(
                    answer | {"short": False}, full, min(k, len(base)), min(k, len(full)), k, False, "defaults", False
                )
                if wrong and wrong[0][0] == "short":
                    wrong = []
                if answer["short"] and len(passing_items) + len(new) >= k:
                    wrong.append(("short", {"passing": len(passing_items), "k": k}, answer))
                if not answer["short"] and len(passing_items) + len(new) < k:
                    wrong.append(("short", {"passing": len(passing_items), "k": k}, answer))
                return wrong
        if lookup.rerank is not None:
            return self._judge_reranked(lookup, answer, generation, None, [base, full[:width]], [full])
        return self._compare(answer, full, min(k, len(base)), min(k, len(full)), k, len(full) < k, "defaults", False)

    # Other tables

    def _judge_user_vector(self, lookup: EntityLookup, answer: Json, generation: Generation) -> list[Complaint]:
        user = lookup.entity
        wrong: list[Complaint] = []
        if user.id in self.knowledge.blocked_users:
            if answer["vector"] is not None or answer.get("reason") != "entity_blocked":
                wrong.append(("vector", "null, entity_blocked", answer))
            return wrong
        view = user_view(generation, user, self._events(generation, stored_only=lookup.stored_only))
        if user.is_sent and user.id is not None:
            self.knowledge.stored_inputs.setdefault((generation.id, user.id), []).append(user)
        if answer["source"] == "previous":
            return wrong + self._judge_numbers(lookup, answer, generation, view, view.vector, "vector")
        if view.brings_vector:
            if "events" in answer:
                wrong.append(("events", "none: the vector is the night's", answer))
        elif user.id is not None:
            wrong += self._judge_events(answer, view)
        return wrong + self._judge_numbers(lookup, answer, generation, view, view.vector, "vector")

    def _judge_mood(self, lookup: EntityLookup, answer: Json, generation: Generation) -> list[Complaint]:
        user = lookup.entity
        if user.id in self.knowledge.blocked_users:
            if answer["values"] is not None or answer.get("reason") != "entity_blocked":
                return [("values", "null, entity_blocked", answer)]
            return []
        view = user_view(generation, user, self._events(generation, stored_only=lookup.stored_only))
        if user.is_sent and user.id is not None:
            self.knowledge.stored_inputs.setdefault((generation.id, user.id), []).append(user)
        wrong: list[Complaint] = []
        if user.id is not None and not view.brings_vector and answer["source"] != "previous":
            wrong = self._judge_events(answer, view)
        return wrong + self._judge_numbers(lookup, answer, generation, view, view.mood, "values")

    def _judge_numbers(
        self,
        lookup: EntityLookup,
        answer: Json,
        generation: Generation,
        view: UserView,
        numbers: Vector | None,
        rule: str,
    ) -> list[Complaint]:
        answered_numbers = answer[rule]
        if numbers is None:
            stored_inputs = self.knowledge.stored_inputs.get((generation.id, lookup.entity.id or ""), [])
            views = [
                user_view(generation, stored_input, self._events(generation, stored_only=lookup.stored_only))
                for stored_input in stored_inputs
            ]
            allowed = [stored_view.vector if rule == "vector" else stored_view.mood for stored_view in views]
            if answered_numbers is not None and answered_numbers not in [
                list(allowed_numbers) for allowed_numbers in allowed if allowed_numbers is not None
            ]:
                return [(rule, None, answer)]
            if answered_numbers is None and answer.get("reason") != "not_in_generation" and not self.knowledge.impaired:
                return [("reason", "not_in_generation", answer)]
            return []
        if answered_numbers != [float(np.float32(number)) for number in numbers]:
            if answered_numbers is None and self.knowledge.impaired:
                return []
            return [(rule, list(numbers), answer)]
        return []

    def _judge_item_vector(self, lookup: EntityLookup, answer: Json, generation: Generation) -> list[Complaint]:
        item = lookup.entity.id or ""
        answered_vector = answer["vector"]
        if item in self.knowledge.blocked_items or (answered_vector is None and self.knowledge.impaired):
            return []
        expected = generation.items.get(item)
        if expected is None:
            return [] if answered_vector is None and "reason" in answer else [("vector", None, answer)]
        return [] if answered_vector == list(expected) else [("vector", list(expected), answer)]

    def _judge_similar(self, lookup: EntityLookup, answer: Json, generation: Generation) -> list[Complaint]:
        item = lookup.entity.id or ""
        know = self.knowledge
        banned = self._banned(lookup, generation)
        wrong = self._judge_items(lookup, answer["items"], answer["scores"], banned, ())
        if wrong or item in know.blocked_items or (know.impaired and answer["source"] == "default"):
            return wrong
        vector = generation.items.get(item)
        width = generation.rules.similar
        k = lookup.k or width
        if vector is None:
            right = answer["items"] == [] and "reason" in answer
            return [] if right else [("similar", "an empty list with a reason", answer)]
        day = day_of(generation, know.events)
        ranked = generation.rank({i: dot(vector, v) for i, v in generation.items.items() if i != item})
        full = [pair for pair in ranked if pair[1] not in banned]
        base = [pair for pair in ranked[:width] if pair[1] not in banned]
        expression = self._filter(lookup, generation)
        if expression is not None:
            passing_ranked = [pair for pair in full if passes(expression, day.attributes[pair[1]])]
            return self._compare(
                answer,
                passing_ranked,
                min(k, len(passing_ranked)),
                min(k, len(passing_ranked)),
                k,
                len(passing_ranked) < k,
                "filter",
                False,
            )
        if lookup.rerank is not None:
            return self._judge_reranked(lookup, answer, generation, None, [base, full[:width]], [full])
        return self._compare(
            answer, full, min(k, len(base)), min(k, len(full)), k, len(full) < k, "similar", answer["source"] == "live"
        )

    def _judge_facet(self, lookup: EntityLookup, answer: Json, generation: Generation) -> list[Complaint]:
        attribute = generation.rules.facets[lookup.table]
        value = lookup.entity.id or ""
        banned = self._banned(lookup, generation)
        wrong = self._judge_items(lookup, answer["items"], answer["scores"], banned, ())
        if wrong or (self.knowledge.impaired and answer["source"] == "default"):
            return wrong
        day = day_of(generation, self.knowledge.events)
        total = generation.interactions

        def has(item: str, attributes: dict[str, object] | None) -> bool:
            attribute_value = (attributes or {}).get(attribute)
            return value in attribute_value if isinstance(attribute_value, list) else attribute_value == value

        of_night = [item for item in generation.items if has(item, dict(generation.attributes[item]))]
        width = generation.rules.facet
        k = lookup.k or width
        ranked = generation.rank({item: generation.counts[item] / total for item in of_night})
        base = [
            pair for pair in ranked[:width] if pair[1] not in banned and has(pair[1], dict(day.attributes[pair[1]]))
        ]
        if not of_night:
            right = (answer["items"], answer["source"], answer.get("reason")) == ([], "default", "not_in_generation")
            return [] if right else [("facet", "[], default, not_in_generation", answer)]
        if lookup.rerank is not None:
            return self._judge_reranked(lookup, answer, generation, None, [base], [base])
        return self._compare(answer, base, min(k, len(base)), min(k, len(base)), k, len(base) < k, "facet", False)

    # Other routes

    def explain_and_ask(self, client: Client, lookup: EntityLookup) -> None:
        """Compare an explanation with the answer to a lookup right after it."""
        settled = self.knowledge.is_settled()
        options = lookup.options()
        body = lookup.entity.body()
        reply = client.send("POST", f"/v1/explain/{lookup.table}", {"entities": [body], **options})
        if reply.status != 200:
            self.report.violate("explain", PROMISES["explain"], 200, reply.body, client.recent[-6:])
            return
        answers = self.judge_lookups(client, lookup)
        self.report.count("explanations")
        if not answers or not settled:
            return
        explained_answer = reply.body["answer"]
        sources = {explained_answer["tier"], answers[0]["source"]}
        if lookup.filter is not None and len(sources) == 2 and sources <= {"l1", "l2", "live"}:
            self.report.count("undecided: under a filter `explain` names the list's tier, `source` the vector's")
            return
        explained_fields = [explained_answer["tier"], explained_answer["reason"], explained_answer["live"]]
        observed_fields = [answers[0]["source"], answers[0].get("reason"), answers[0].get("live")]
        if self.knowledge.impaired and {explained_fields[1], observed_fields[1]} == {"l2_down", "breaker_open"}:
            # Whether Redis is asked at all changes from one request to the next.
            explained_fields[1] = observed_fields[1]
        self.report.require(
            explained_fields == observed_fields,
            "explain",
            PROMISES["explain"],
            {"explained": explained_answer, "sentence": reply.body["sentence"]},
            answers[0],
            client.recent[-6:],
        )

    def score(self, client: Client, user: Input, candidates: list[str], expression: Json | None = None) -> None:
        """Ask `/v1/score` and judge the order, the scores and what was left out."""
        body: Json = {"user": user.body(), "items": candidates}
        if expression is not None:
            body["filter"] = expression
        know = self.knowledge
        while True:
            settled = know.is_settled()
            reply = client.send("POST", "/v1/score", body)
            self.report.count("scores")
            if reply.status != 200:
                wrong: list[Complaint] = [("status", 200, reply.body)]
            else:
                answer = reply.body
                know.answered[answer["table"], answer["source"]] += 1
                if "reason" in answer and answer["source"] not in ("l1", "l2"):
                    know.reasons[answer["table"], answer["reason"]] += 1
                if "events" in answer:
                    know.with_events[answer["table"]] += 1
                wrong = self._judge_score(user, candidates, expression, answer)
            if not wrong:
                return
            if settled:
                for rule, expected, observed in wrong:
                    self.report.violate(rule, PROMISES[rule], expected, observed, client.recent[-12:])
                return
            time.sleep(0.05)

    def _judge_score(
        self, user: Input, candidates: list[str], expression: Json | None, answer: Json
    ) -> list[Complaint]:
        know = self.knowledge
        if answer["source"] == "previous":
            self.report.count("scores by the previous generation")
            return []
        if answer["generation"] not in know.allowed:
            return [("generation", sorted(know.allowed), answer["generation"])]
        generation = know.generations[answer["generation"]]
        view = user_view(generation, user, self._events(generation))
        if user.id in know.blocked_users or know.impaired:
            return []
        day = day_of(generation, know.events)
        catalogue_candidates = [item for item in candidates if item in generation.items]
        blocked = [item for item in catalogue_candidates if item in know.blocked_items]
        if set(answer["blocked"]) & set(answer["items"]) or set(blocked) & set(answer["items"]):
            return [("banned", sorted(blocked), answer)]
        excluded = [item for item in catalogue_candidates if item in (user.history or ())]
        open_ = [item for item in catalogue_candidates if item not in blocked and item not in excluded]
        if expression is not None:
            failing = [item for item in open_ if not passes(expression, day.attributes[item])]
            if set(failing) & set(answer["items"]):
                return [("passes", failing, answer)]
            open_ = [item for item in open_ if item not in failing]
        if view.vector is None:
            stored_inputs = know.stored_inputs.get((generation.id, user.id or ""), [])
            return [] if stored_inputs or not answer["scores"] else [("score route", "no scores", answer)]
        vectors = [view.vector]
        if user.country is not None and not view.is_live:
            sent_vector = user_view(generation, Input(None, user.history, user.country), []).vector
            vectors += [sent_vector] if sent_vector is not None else []
        answered_ranking = [(float(np.float32(s)), i) for s, i in zip(answer["scores"], answer["items"], strict=True)]
        wrong: list[Complaint] = []
        rankings = [
            [
                (float(np.float32(score)), item)
                for score, item in generation.rank({i: dot(vector, generation.items[i]) for i in set(open_)})
            ]
            for vector in vectors
        ]
        if answered_ranking not in rankings:
            ordered = [score for score, _ in answered_ranking] == sorted(
                (score for score, _ in answered_ranking), reverse=True
            )
            if not (ordered and sorted(answered_ranking) in [sorted(ranking) for ranking in rankings]):
                wrong.append(("score route", rankings, answer))
            else:
                self.report.count("undecided: equal scores of /v1/score in another order than the catalogue's")
        if sorted(answer["unknown"]) != sorted({item for item in candidates if item not in generation.items}):
            wrong.append(("score route", "unknown: those that the generation does not have", answer))
        allowed_event_counts = {view.events} if len(vectors) == 1 else {view.events, 0}
        if not view.brings_vector and answer.get("events", 0) not in allowed_event_counts and user.id is not None:
            wrong.append(("events", view.events, answer))
        return wrong

    def learn_order(self, client: Client, id_: str) -> None:
        """Learn the catalogue's order from lists whose scores are all equal."""
        generation = self.knowledge.generations[id_]
        ordered_items, answer = self._read_all_items(client, generation)
        for _ in range(_READS_MAX):
            # A change of the blocklist may take effect between two pages of a read: read until two reads agree.
            previous_items, (ordered_items, answer) = (ordered_items, self._read_all_items(client, generation))
            if ordered_items == previous_items:
                break
        missing = set(generation.items) - set(ordered_items) - self.knowledge.blocked_items
        self.report.require(
            not missing and all(score == 0 for score in answer["scores"]),
            "filter",
            PROMISES["filter"],
            "every item of the catalogue, all with score 0",
            {"missing": sorted(missing), "answer": answer},
            client.recent[-3:],
        )
        earlier = [item for item in self.knowledge.order if item in generation.items]
        certain = set(earlier) - self.knowledge.guessed_places
        common = [item for item in earlier if item in set(ordered_items) & certain]
        self.report.require(
            common == [item for item in ordered_items if item in certain],
            "order",
            PROMISES["order"],
            common,
            ordered_items,
            ["ask for a list whose scores are all equal, in two generations"],
        )
        self.knowledge.guessed_places = set(earlier) - set(ordered_items)
        for earlier_index, item in enumerate(earlier):
            if item not in ordered_items:
                ordered_items.insert(ordered_items.index(earlier[earlier_index - 1]) + 1 if earlier_index else 0, item)
        self.knowledge.order = ordered_items
        generation.order.update({item: ordinal for ordinal, item in enumerate(ordered_items)})

    def _read_all_items(self, client: Client, generation: Generation) -> tuple[list[str], Json]:
        """Read all items of the catalogue, page by page; return them and the last answer."""
        ordered_items: list[str] = []
        # Send an input that was never sent before: a stored answer would lack what was blocked when it was computed.
        self.knowledge.catalogue_reads += 1
        zero = Input(None, (f"unheard of {self.knowledge.catalogue_reads}",), 0)
        while True:
            reply = client.lookup(
                "user_topk",
                [zero.body()],
                k=generation.rules.topk,
                filter=EVERYTHING,
                exclude=ordered_items,
                generation=generation.id,
            )
            client.recent.clear()
            if reply.status != 200:
                raise AssertionError(f"the catalogue's order cannot be read: {reply.body}")
            answer = reply.body["answers"][0]
            self.knowledge.answered[answer["table"], answer["source"]] += 1
            if "reason" in answer and answer["source"] not in ("l1", "l2"):
                self.knowledge.reasons[answer["table"], answer["reason"]] += 1
            ordered_items += [item for item in answer["items"] if item in generation.items]
            if answer["short"]:
                return ordered_items, answer
