"""A click, followed from the event that was sent to the night that takes it over; each answer on the way is judged."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import orjson

from infra.demo.checks import Judge, Question
from infra.demo.dataset import Dataset
from infra.demo.evaluate import TOP, answer_to_json
from infra.demo.http import get
from infra.demo.steps import Step
from serving.client import Answer, Client, EventReceipt, NewEvent, Options, Policy

TABLE = "user_topk"
ITEMS_SHOWN = 4
COUNTED_S = 10.0
SHOWN_S = 3.0
"""Seconds that the dashboard may lag behind answers: its document is made again each second, its counts each two."""
DEADLINE_MS = 5_000


class Click:
    """Click of a user for whom nothing else changes, so that the next list is the one that was answered live.

    Raises Unanswered, and ValueError with what does not hold. `judge`, which is for one thread at a time, hears of all
    answers when `judged` is called.
    """

    def __init__(self, url: str, data: Dataset, judge: Judge) -> None:
        arriving = set(data.arriving.users.to_pylist())
        users = [user for user in data.histories if user not in arriving]
        self.user = users[0] if users else next(iter(data.histories))
        self.item = ""
        self.counted_ms = 0.0
        self._is_alone = bool(users)
        self._url, self._judge = url, judge
        self._live: Answer | None = None
        self._unjudged_answers: list[tuple[Question, Mapping[str, Any]]] = []

    def send(self, step: Step) -> None:
        """Send the click, and notes what it changed."""
        with self._client() as larder:
            answer_before = self._look_up(larder)
            if not answer_before.items:
                raise ValueError(f"{self.user} has no list")
            self.item = answer_before.items[min(1, len(answer_before.items) - 1)]
            click = NewEvent("demo-click", user=self.user, item=self.item, type="click")
            receipt = larder.send_events([click])
            if receipt.accepted != 1:
                raise ValueError(f"the click was not accepted: {receipt}")
            after = self._live = self._until_counted(larder)
            stored_answer = self._look_up(larder, max_events=0)
        if stored_answer.items != answer_before.items or stored_answer.events:
            raise ValueError(f"max_events=0 is not the stored list: {stored_answer}")
        self.judged()
        step.note(f"{self.user} clicks on {self.item}: 202, {receipt.durability} kept")
        step.note(f"before  {_format_items(answer_before)}")
        step.note(f"after   {_format_items(after)}")
        step.note(
            f"events {after.events}, as of {after.as_of}, {self.counted_ms:.0f} ms after the 202"
        )
        step.note("max_events=0: the list as it was")
        step.note(self._dashboard(receipt))

    def taken_over(self, step: Step) -> None:
        """Hold the list of a night that took the click over against the one that was answered live."""
        with self._client() as larder:
            night_answer = self._look_up(larder)
        if night_answer.events or night_answer.producer != "batch":
            raise ValueError(
                f"the night did not take the click of {self.user} over: {night_answer}"
            )
        if self._is_to_be(night_answer):
            step.note(f"it has the click: the list of {self.user} is the one answered live")

    def counted_again(self, step: Step) -> None:
        """Hold the list after a roll back to a generation without the click against the one that was answered live."""
        with self._client() as larder:
            rollback_answer = self._until_counted(larder)
        if self._is_to_be(rollback_answer):
            step.note(f"which lacks the click: events {rollback_answer.events}, and the same list")

    def judged(self) -> None:
        """Has the judge hear of the answers since the last time."""
        for question, answer in self._unjudged_answers:
            self._judge.request([question], [answer])
        self._unjudged_answers.clear()

    def _is_to_be(self, later_answer: Answer) -> bool:
        """True if the list could be compared; raises ValueError where it is another one than before."""
        live = self._live
        if live is None or not self._is_alone or live.approximate or later_answer.approximate:
            return False
        if later_answer.items != live.items:
            raise ValueError(
                f"{self.user} was answered {live.items}, and now is {later_answer.items}"
            )
        return True

    def _client(self) -> Client:
        # Sent once, so that what the service counted is what was asked.
        return Client(self._url, policy=Policy(attempts=1))

    def _look_up(self, larder: Client, max_events: int | None = None) -> Answer:
        options = Options(k=TOP, deadline_ms=DEADLINE_MS, max_events=max_events)
        (answer,) = larder.lookup_many(TABLE, [self.user], options)
        hidden = frozenset([self.item]) if answer.events else frozenset[str]()
        self._unjudged_answers.append(
            (Question(TABLE, self.user, TOP, hidden), answer_to_json(answer))
        )
        return answer

    def _until_counted(self, larder: Client) -> Answer:
        started_at = time.perf_counter()
        while time.perf_counter() < started_at + COUNTED_S:
            answer = self._look_up(larder)
            if answer.events:
                self.counted_ms = (time.perf_counter() - started_at) * 1000
                return answer
            time.sleep(0.005)
        raise ValueError(f"the click of {self.user} is not counted after {COUNTED_S:.0f} s")

    def _dashboard(self, receipt: EventReceipt) -> str:
        started_at = time.perf_counter()
        while True:
            # For somebody who has it open the document was made already, and may be a moment old.
            status, raw = asyncio.run(get(self._url, "/dashboard/data"))
            events = orjson.loads(raw).get("events") if status == 200 else None
            accepted = events["results"].get("accepted") if events else None
            if events and accepted and events["counted_until"] == receipt.position:
                return f"dashboard: {accepted} accepted, {events['lag_s'] or 0:.1f} s behind"
            if time.perf_counter() > started_at + SHOWN_S:
                raise ValueError(f"the dashboard does not show event {receipt.position}: {events}")
            time.sleep(0.1)


def _format_items(answer: Answer) -> str:
    return ", ".join((answer.items or ())[:ITEMS_SHOWN])
