"""Explanation of an entity's answer: what each rung holds of it, which would answer, and what live would say now."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache.errors import CorruptArtefact
from cache.events.position import Position
from cache.filters.masks import Passing
from cache.filters.reranking import Reranker
from cache.format.manifest import Table
from cache.format.records.codec import Record, decode
from cache.format.records.layout import is_live, peek_format
from cache.l2.data_plane import DataPlane
from cache.store.artefacts import ArtefactStore
from cache.tiers.inspector import Looking
from cache.tiers.results import Found, Missed, MissReason, Outcome, Want
from cache.tiers.tiered import Tiered
from serving.admission.controller import Admission
from serving.answers.sources import STORED, Source
from serving.explain.difference import difference
from serving.explain.page_check import PageChecks
from serving.explain.replay import Replay, Unheard
from serving.explain.rescore import Rescorer, Said
from serving.explain.summary import sentence
from serving.fresh.newer_events import CountedEvents, NewerEvents, iso_of
from serving.generations.pointer_follower import Follower
from serving.generations.served_set import Holding
from serving.generations.snapshot import Snapshot
from serving.generations.store_threads import InThread
from serving.lookup.entity import Case, cases_of, want_of_previous
from serving.lookup.event_counting import count_newer
from serving.lookup.micro_batcher import MicroBatcher
from serving.ranking.filters import Filters
from serving.rendering.answer_fields import Prediction, from_defaults, from_record, is_cut
from serving.requests.errors import Problem, unprocessable
from serving.requests.models import Ask

AT_ONCE = 2
"""Explanations under way: each reads a whole page, and runs the model."""


class Explainer:
    """Looks without changing anything: no record is kept, no answer counted."""

    def __init__(
        self,
        follower: Follower,
        tiers: Tiered,
        remote: DataPlane,
        batcher: MicroBatcher,
        admission: Admission,
        store: ArtefactStore,
        filters: Filters,
        newer: NewerEvents,
        *,
        in_thread: InThread,
    ) -> None:
        self._follower = follower
        self._looking = looking = Looking(tiers, remote)
        self._pages = PageChecks(looking, remote.control.keyspace, store, in_thread)
        self._rescorer = Rescorer(batcher, admission, looking)
        self._filters = filters
        self._newer = newer
        self._under_way = 0
        self._unheard = Unheard()

    async def explain(self, holding: Holding, ask: Ask) -> dict[str, Any]:
        """Explains the one entity asked; raises Problem for several, for what never can be answered, and when busy."""
        if len(ask.entities) != 1:
            raise unprocessable("batch_too_long", "one entity is explained at a time", "entities")
        if self._under_way >= AT_ONCE:
            raise Problem(503, "overloaded", f"{AT_ONCE} explanations are under way here")
        self._under_way += 1
        try:
            return await self._told(holding.pinned(ask.options.generation), ask)
        finally:
            self._under_way -= 1

    async def _told(self, holding: Holding, ask: Ask) -> dict[str, Any]:
        snapshot = holding.live
        (case,) = await cases_of(snapshot, ask)

        async def read_records(wants: Sequence[Want]) -> Sequence[Outcome]:
            return [await self._looking.record(snapshot.view, want) for want in wants]

        await count_newer(self._newer, snapshot, [case], ask.options, read_records)
        deadline = time.monotonic() + ask.options.deadline_s
        passing = await self._filters.passing(snapshot, ask.options.filter, deadline)
        reranker = await self._filters.reranker(snapshot, ask.options.rerank, deadline)
        table, want, raw, asked = case.table, case.of_the_night, case.entity.raw, case.want
        view = snapshot.view
        l1, l2 = self._looking.l1(view, asked), await self._looking.l2(view, asked)
        beside = self._looking.beside(view, asked)
        barred = case.history_in(snapshot).seen if table.kind == "topk" else frozenset()
        if case.counted is not None:
            barred |= frozenset(snapshot.numbers_of(case.counted.items).tolist())
        records = Records(snapshot, case, barred)
        if snapshot.blocks(table, raw):
            case.reason = "entity_blocked"
        stored = records.of_the_night(l1, l2)
        said = await self._rescorer.say(snapshot, case, stored and stored[0])
        replay = Replay(self._looking, l1, l2, beside, said)
        answered = await replay.answered(holding, case, ask.options, self._unheard)
        previous = await self._previous(holding, answered, replay)
        answer = _answer(answered, said)
        is_stored = answer["tier"] in STORED
        chosen = await replay.look(view, answered.want) if is_stored else None
        told: dict[str, Any] = {
            "table": table.name,
            "id": case.entity.id,
            "generation": snapshot.generation,
            "epoch": snapshot.epoch,
            "published_at": snapshot.published_at,
            "age_seconds": round(time.time() - snapshot.manifest.data_until, 3),
            "stale": self._follower.stale,
            "degraded": snapshot.degraded,
            "answer": answer,
            "directory": self._directory(snapshot, want),
            "events": _events(snapshot, case.counted),
            "new_items": _new_items(answered),
            "page": await self._pages.told(snapshot, want.table, want)
            if want.position >= 0
            else None,
            "l1": self._tier(l1),
            "l2": self._tier(l2),
            "same_bytes": _same(l1, l2),
            "record": None,
            "filter": passing and {"passing": passing.count, "items": snapshot.numbered},
            "rerank": ask.options.rerank and {"by": ask.options.rerank.named},
            "previous": previous,
            "model": said.told(),
            "difference": None,
        }
        shown = stored or records.any_of(chosen, l1, l2)
        now = None if said.record is None else records.prediction(said.record)
        told["model"] |= now or {}
        if shown is not None:
            prediction = records.prediction(shown[0])
            told["record"] = _record(*shown, prediction)
            if passing is not None and shown[0].items is not None:
                told["filter"] |= _within(records.prediction(shown[0], passing), shown[0], table)
                told["filter"] |= {"table": want.table.name}
            if reranker is not None and shown[0].items is not None:
                within = records.prediction(shown[0], passing, reranker)
                told["rerank"] |= {"items_of_list": within["items"]}
            if now is not None and want.table is table:
                told["difference"] = difference(prediction, now)
        if answer["tier"] == Source.DEFAULT and raw is not None:
            had = frozenset(answered.had_by_night(snapshot).tolist())
            told["default"] = from_defaults(snapshot, table, case.entity, case.k, (barred, had))
        return told | {"sentence": sentence(told)}

    def _directory(self, snapshot: Snapshot, want: Want) -> dict[str, Any]:
        entities = snapshot.manifest.entity_sets[want.table.entity]
        hash_ = f"{want.key:016x}" if isinstance(want.key, int) else want.key.hex()
        return {
            "known": want.position >= 0,
            "hash": hash_,
            "seed": entities.seed,
            "position": want.position if want.position >= 0 else None,
            "entities": entities.count,
        }

    def _tier(self, outcome: Outcome | None) -> dict[str, Any]:
        if outcome is None:
            return {"found": False, "reason": "absent"}
        if isinstance(outcome, Missed):
            return {"found": False, "reason": outcome.reason.value}
        left_s = None if outcome.expires_at is None else outcome.expires_at - time.monotonic()
        return {"found": True, "by": "live" if outcome.live else "batch"} | (
            {} if left_s is None else {"expires_in_seconds": round(left_s, 3)}
        )

    async def _previous(
        self, holding: Holding, case: Case, replay: Replay
    ) -> dict[str, Any] | None:
        """Result of a read from the previous generation; None where none is held."""
        previous = holding.previous
        if previous is None:
            return None
        told: dict[str, Any] = {"generation": previous.generation, "found": False, "reason": None}
        want = want_of_previous(previous, case)
        if isinstance(want, str):
            return told | {"reason": want}
        outcome = await replay.look(previous.view, want)
        if isinstance(outcome, Missed):
            return told | {"reason": outcome.reason.value}
        try:
            decode(want.table.layout, outcome.record, previous.items.count)
        except CorruptArtefact:
            return told | {"reason": MissReason.CORRUPT}
        return told | {"found": True}


def _events(snapshot: Snapshot, counted: CountedEvents | None) -> dict[str, Any] | None:
    """Events that the answer counts, and the position up to which the generation has them; None without any."""
    if counted is None or snapshot.events is None:
        return None
    return {
        "until": str(Position.of_number(snapshot.events.until)),
        "as_of": counted.as_of,
        "counted": [
            {
                "item": each.item.decode(),
                "time": iso_of(each.at_us / 1e6),
                "position": str(Position.of_number(each.number)),
            }
            for each in counted.input.events
        ],
    }


def _new_items(case: Case) -> list[dict[str, str]]:
    """New items in the answer, and the positions that brought them."""
    named = () if case.answer is None else case.answer.get("items") or ()
    found = {each.raw.decode(): each.number for each in case.new_items.items}
    return [
        {"item": item, "position": str(Position.of_number(found[item]))}
        for item in named
        if item in found
    ]


def _answer(case: Case, said: Said) -> dict[str, Any]:
    """The source of the answer, why it is no plain hit, and why live gave none although it had an input."""
    source = "default" if case.answer is None else case.answer["source"]
    is_stored = source in STORED
    reason = None if case.answer is None else case.answer.get("reason")
    live = said.reason if said.is_of_input and not is_stored else None
    return {"tier": source, "reason": reason and str(reason), "live": live}


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Records that were seen of one case, as they would be answered."""

    snapshot: Snapshot
    case: Case
    barred: frozenset[int]

    def of_the_night(self, *outcomes: Outcome | None) -> tuple[Record, Found] | None:
        """The record that the night computed, from the first tier that has it."""
        return next((each for each in self._readable(outcomes) if not each[1].live), None)

    def any_of(self, *outcomes: Outcome | None) -> tuple[Record, Found] | None:
        """The first record that can be read."""
        return next(iter(self._readable(outcomes)), None)

    def prediction(
        self, record: Record, passing: Passing | None = None, reranker: Reranker | None = None
    ) -> Prediction:
        """Prediction as it would be answered: without what is blocked, seen, filtered out or beyond `k`."""
        case, barred = self.case, (self.barred,)
        return from_record(self.snapshot, case.table, record, case.k, barred, passing, reranker)

    def _readable(self, outcomes: tuple[Outcome | None, ...]) -> list[tuple[Record, Found]]:
        found = [each for each in outcomes if isinstance(each, Found)]
        decoded = [(self._decoded(each), each) for each in found]
        return [(record, each) for record, each in decoded if record is not None]

    def _decoded(self, found: Found) -> Record | None:
        try:
            return self.case.decoded(self.snapshot, found.record)
        except CorruptArtefact:
            return None


def _within(prediction: Prediction, record: Record, table: Table) -> dict[str, Any]:
    """Items of the stored list that pass the filter, and what a lookup answers from: that, or vectors."""
    source = "vectors" if is_cut(prediction, record, table) else "list"
    return {"items_of_list": prediction["items"], "from": source}


def _record(record: Record, found: Found, prediction: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "by": "live" if is_live(found.record) else "batch",
        "bytes": len(found.record),
        "format": peek_format(found.record),
        "fingerprint": f"{record.fingerprint:016x}",
        "scored_at": record.scored_at,
        "count": len(record.numbers),
        **prediction,
    }


def _same(l1: Outcome | None, l2: Outcome) -> bool | None:
    """True if both tiers hold the same bytes; None unless both hold something."""
    if not isinstance(l1, Found) or not isinstance(l2, Found):
        return None
    return l1.record == l2.record
