"""Cold start: those of whom only features are known are asked for beside a user of the night."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infra.demo.checks import Judge, Question
from infra.demo.evaluate import answer_to_json
from infra.demo.features.profiles import Profiles
from serving.answers.sources import Source
from serving.client import Answer, Client, Entity, Options, Policy

ITEMS_SHOWN = 2
DEADLINE_MS = 5_000
NEW = ("new user", "new item")


class ColdStart(NamedTuple):
    """Answer as a table shows it."""

    entity_kind: str
    table: str
    source: str
    producer: str
    answer: str


def ask_cold(
    url: str,
    profiles: Profiles,
    histories: Mapping[str, Sequence[str]],
    judge: Judge,
) -> list[ColdStart]:
    """Answers for a user with a history, for one and an item without a click, and for two that are in no table.

    `judge` sees them as they came. Raises Unanswered, and ValueError where what is in no table was not answered live.
    """
    new_user, new_item = profiles.new_user, profiles.new_item
    known_user = next(iter(histories))
    quiet_user = next(user for user in profiles.users if user not in histories)
    entity_by_kind_and_table = {
        ("known user", "user_topk"): Entity(known_user),
        ("known user", "user_affinity"): Entity(known_user),
        ("quiet user", "user_topk"): Entity(quiet_user, features=profiles.users[quiet_user]),
        ("unseen item", "item_similar"): Entity(profiles.unseen[0]),
        ("new item", "item_similar"): Entity(str(new_item["item"]), features=new_item),
        ("new user", "user_topk"): Entity("new-user", features=new_user),
        ("new user", "user_affinity"): Entity("new-user", features=new_user),
    }
    entities = [
        Entity(entity.id, features=entity.features, table=table)
        for (_, table), entity in entity_by_kind_and_table.items()
    ]
    # Sent once, so that what the service counted is what was asked.
    with Client(url, policy=Policy(attempts=1)) as larder:
        options = Options(k=ITEMS_SHOWN, deadline_ms=DEADLINE_MS)
        answers = larder.lookup_tables(entities, options)
    questions = [Question(str(entity.table), str(entity.id), ITEMS_SHOWN) for entity in entities]
    judge.request(questions, [answer_to_json(lookup_answer) for lookup_answer in answers])
    for (entity_kind, table), answer in zip(entity_by_kind_and_table, answers, strict=True):
        if entity_kind in NEW and answer.source != Source.LIVE:
            raise ValueError(f"{entity_kind}, {table}: {answer.source} ({answer.reason}), not live")
    return [
        ColdStart(
            entity_kind,
            table,
            answer.source,
            str(answer.producer),
            _describe_answer(answer, profiles),
        )
        for (entity_kind, table), answer in zip(entity_by_kind_and_table, answers, strict=True)
    ]


def describe_features(features: Mapping[str, Any]) -> str:
    """Features in a few words."""
    return ", ".join(f"{name} {value}" for name, value in features.items())


def _describe_answer(answer: Answer, profiles: Profiles) -> str:
    if answer.items is not None:
        kinds = [str(profiles.items[item]["category"]) for item in answer.items]
        return ", ".join(kinds)
    values, labels = answer.values, answer.labels
    if values is None or labels is None:
        return "nothing"
    top_position = max(range(len(labels)), key=lambda position: float(values[position]))
    return f"{labels[top_position]} {values[top_position]:.2f}"
