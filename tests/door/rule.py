"""The rule for reading HTTP: the service answers no request whose end another parser would see elsewhere.

A stream of bytes is sent on one connection, and the sender closes its side. Two judges (h11, and llhttp in Node's HTTP
server) read the same stream. Each gives the messages that it takes, and how the stream ends: *clean* behind a whole
message, *closed* behind one whose sender asked for that, *refused* in bytes that are no whole message, or *silent*
behind a request for another protocol, where llhttp stops. A service gives answers. An answer is a *refusal* if its
status is one of `REFUSALS` and it closes the connection; all others are *taken*. A message's framing is its method, its
target and the bytes of its body. Then:

1. A refusal is the last answer, and behind the last answer no byte comes.
2. Answer number i, taken, is the answer to message number i of every judge: the judge has such a message, the framings
   of the judges are the same, and the ids of the answer, if it has any, are those that this message asks for. A plain
   lookup (`asks_for`) is answered with 200 and its ids.
3. Unless the last answer is a refusal, or says that the connection ends, the service has taken as many messages as
   every judge that is not silent, and no judge refuses.
4. With such an answer it may have taken fewer messages than the judges: a service may be stricter, never more lenient.
   In particular what a judge refuses is never taken.
5. A message whose head the judges have read, and whose body breaks off or is wrong, may be answered with an error that
   does not depend on the body (404, 405 and the like); so may a GET or HEAD, whose body says nothing, with its answer.
   That is the last answer.

Where a judge is stricter than the RFCs demand, so that a service may take what it refuses, `LENIENCIES` names the case.
That judge then says nothing about the messages from there on, and the other one still has to agree.

Texts of errors, and which refusal it is, are not compared.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.door.judges import Message, Reading
from tests.door.wire import Answer, Exchange

REFUSALS = frozenset({400, 408, 413, 429, 431, 501, 503, 505})
"""Statuses with which a service refuses to read on: those of the grammar, and those of its bounds."""

_TARGET = re.compile(r"/v1/lookup/user_topk/([0-9A-Za-z]{1,20})\?k=1")
_TAB_BEHIND_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*\d+ *\t[ \t]*\r\n")
_PLAIN_FIELDS = frozenset({"host", "content-length", "transfer-encoding", "connection"})


class Leniency(NamedTuple):
    """A refusal of a judge that a service need not share, and the reason."""

    judge: str
    applies: Callable[[Reading, bytes], bool]
    reason: str


LENIENCIES: list[Leniency] = [
    Leniency(
        "llhttp",
        lambda reading, stream: (
            reading.error_message == "HPE_INVALID_CONTENT_LENGTH" and bool(_TAB_BEHIND_LENGTH.search(stream))
        ),
        "RFC 9110, section 5.6.3: a tab behind a value is no part of it; llhttp 9.3 refuses it behind a length",
    ),
]  # fmt: skip


def violations(
    readings: dict[str, Reading], exchange: Exchange, stream: bytes, *, preceding_count: int = 0
) -> list[str]:
    """Return how a service's answers break the rule; the first `preceding_count` answer earlier requests."""
    answers = exchange.answers[preceding_count:]
    broken = [f"bytes that are no answer: {exchange.leftover[:80]!r}"] if exchange.leftover else []
    refusals = [number for number, answer in enumerate(answers) if is_refusal(answer)]
    taken_answers = [answer for answer in answers if not is_refusal(answer)]
    if refusals and refusals != [len(answers) - 1]:
        broken.append(f"answer {refusals[0]} of {len(answers)} is a refusal, and not the last one")
    bound = {
        name: reading for name, reading in readings.items()
        if not _is_lenient(name, reading, stream, len(taken_answers))
    }  # fmt: skip
    for number, answer in enumerate(taken_answers):
        broken += _violations_of_one(number, answer, bound, readings, count=len(answers))
    last = len(answers) - 1
    is_ended = bool(answers) and (answers[last].is_last or _is_before_the_end(last, answers[last], bound))
    if not is_ended:
        for name, reading in bound.items():
            if len(taken_answers) < len(reading.messages):
                broken.append(f"{name} takes {len(reading.messages)} messages, {len(taken_answers)} are answered")
            if reading.end == "refused":
                broken.append(f"{name} refuses the end ({reading.error_message}), the service refuses nothing")
    return broken


def is_refusal(answer: Answer) -> bool:
    """Return whether the answer refuses to read on."""
    return answer.status in REFUSALS and answer.is_last


def asks_for(message: Message) -> list[str] | None:
    """Return the ids that a plain lookup requests; None for any other message."""
    if {name for name, _ in message.fields} - _PLAIN_FIELDS:
        return None
    if message.method == "GET" and (target := _TARGET.fullmatch(message.target)):
        return [target[1]]
    if message.method == "POST" and message.target == "/v1/lookup/user_topk":
        try:
            document = json.loads(message.body)
        except ValueError:
            return None
        if isinstance(document, dict) and set(document) == {"entities", "k"} and document["k"] == 1:
            entities = document["entities"]
            if isinstance(entities, list) and entities and all(isinstance(i, str) for i in entities):
                return list(entities)
    return None


def _violations_of_one(
    number: int, answer: Answer, bound: dict[str, Reading], readings: dict[str, Reading], *, count: int
) -> list[str]:
    if number == count - 1 and _is_before_the_end(number, answer, bound):
        return []
    missing = [name for name, reading in bound.items() if number >= len(reading.messages)]
    if missing:
        refusal_text = "; ".join(f"{name} refuses it ({readings[name].error_message})" for name in missing)
        return [f"answer {number} ({answer.status} {answer.ids}) is to no message: {refusal_text}"]
    messages = [r.messages[number] for r in readings.values() if number < len(r.messages)]
    if not messages:
        return [f"answer {number} ({answer.status} {answer.ids}) is to a message that no judge takes"]
    framings = {message.framing for message in messages}
    if len(framings) > 1:
        return [f"answer {number}: the judges differ in what it answers, and it was taken: {framings}"]
    expected_ids = asks_for(messages[0])
    if expected_ids is not None and (answer.status != 200 or (answer.body and answer.ids != expected_ids)):
        return [f"answer {number} is {answer.status} {answer.ids} {answer.body[:80]!r}, asked was {expected_ids}"]
    if expected_ids is None and answer.ids and not _could_ask_for(messages[0], answer.ids):
        return [f"answer {number} has the ids {answer.ids}, its message does not name them"]
    return []


def _is_before_the_end(number: int, answer: Answer, bound: dict[str, Reading]) -> bool:
    """Return True if a message within which each judge stops is answered, and by nothing that its body decides."""
    return bool(bound) and all(
        len(reading.messages) == number
        and len(reading.heads) > number
        and (400 <= answer.status < 500 or _is_of_head(answer, *reading.heads[number]))
        for reading in bound.values()
    )


def _is_of_head(answer: Answer, method: str, target: str) -> bool:
    return method in ("GET", "HEAD") and all(name in target for name in answer.ids)


def _could_ask_for(message: Message, ids: Sequence[str]) -> bool:
    message_text = f"{message.target} {message.body.decode('latin-1')}"
    return all(name in message_text for name in ids)


def _is_lenient(name: str, reading: Reading, stream: bytes, taken_count: int) -> bool:
    """Return True if the service has come to where this judge is silent, or refuses what a service may take."""
    if reading.end not in ("refused", "silent") or taken_count < len(reading.messages):
        return False
    return reading.end == "silent" or any(
        leniency.judge == name and leniency.applies(reading, stream) for leniency in LENIENCIES
    )
