"""Two releases over one Redis and one store: what either writes or moves, services of both follow and answer alike.

Each test leaves a generation live and one before it. It runs in both orders: what the first release does in one, the
second does in the other.
"""

from typing import Any

import pytest

from tests.checkouts import Checkout
from tests.upgrade.conftest import BOTH
from tests.upgrade.shop import CUTS, Shop, rule_of, until

pytestmark = pytest.mark.slow

TABLES = ("user_topk", "user_vector", "user_affinity", "item_vector", "item_similar")
MOMENTARY = {"age_seconds"}
"""Fields that depend on when it was asked."""
WHY = ("--reason", "a test")


def alike(answers: list[dict[str, Any]], but: set[str] = MOMENTARY) -> list[dict[str, Any]]:
    """The answers without what may differ between two that are right."""
    return [
        {name: value for name, value in answer.items() if name not in but and value is not None} for answer in answers
    ]


def publish_again(shop: Shop, release: Checkout, generation: str) -> None:
    """What was rolled back or abandoned is verified and published."""
    shop.tell(release, "verify", generation)
    shop.tell(release, "publish", generation)
    shop.follow(generation)


@pytest.mark.parametrize("table", TABLES)
def test_both_give_the_same_answers_field_by_field(shop: Shop, table: str) -> None:
    ids = shop.items(20) if table.startswith("item") else shop.users(20)
    body = {"entities": [{"id": id_} for id_ in [*ids, "nobody-knows"]]}

    for read in (shop.ask, shop.ask_arrow):
        old, new = (alike(read(name, table, body)) for name in BOTH)
        assert old == new
        assert {answer["generation"] for answer in new} == {shop.live()}
        assert {answer["source"] for answer in new[:-1]} <= {"l1", "l2"}
    for id_ in ids[:3]:
        old_answers, new_answers = (alike([shop.get(name, f"/v1/lookup/{table}/{id_}")]) for name in BOTH)
        assert old_answers == new_answers


def test_both_compute_the_same_for_an_unknown_user_with_a_history(shop: Shop) -> None:
    history = shop.items(5)
    for first, second in (BOTH, reversed(BOTH)):
        # The release asked second may read what the first has stored: the same answer, from another source.
        body = {"entities": [{"id": f"visitor-{first}", "history": history}]}
        for read in (shop.ask, shop.ask_arrow):
            answer_by_release = {name: read(name, "user_topk", body)[0] for name in (first, second)}
            assert {answer["producer"] for answer in answer_by_release.values()} == {"live"}
            elsewhere = MOMENTARY | {"source", "reason", "scores"}
            assert alike([answer_by_release["old"]], elsewhere) == alike([answer_by_release["new"]], elsewhere)
            # The locks of the two releases may have different versions of ONNX Runtime.
            assert answer_by_release["old"]["scores"] == pytest.approx(answer_by_release["new"]["scores"], rel=1e-5)


@pytest.mark.storm
def test_the_steps_of_one_night_are_taken_in_turns(shop: Shop) -> None:
    generations_before = set(shop.store.names("generations"))

    shop.tell(shop.first, "begin", "--data-until", CUTS[2])
    (generation,) = set(shop.store.names("generations")) - generations_before
    shop.tell(shop.second, "score", generation)
    shop.tell(shop.first, "index", generation)
    shop.tell(shop.second, "quantize", generation)
    shop.tell(shop.first, "load", generation)
    shop.tell(shop.second, "verify", generation)
    shop.tell(shop.first, "publish", generation)

    shop.follow(generation)


def test_one_rolls_back_and_the_other_publishes_again(shop: Shop) -> None:
    live, previous_generation = shop.live(), shop.previous()

    shop.tell(shop.first, "roll-back", *WHY)
    shop.follow(previous_generation)
    newest_record = shop.history()[-1]
    assert (newest_record.action, newest_record.generation, newest_record.is_done) == (
        "roll_back",
        previous_generation,
        True,
    )

    publish_again(shop, shop.second, live)


@pytest.mark.storm
def test_a_canary_of_one_is_split_alike_by_both_and_ended_by_the_other(shop: Shop) -> None:
    candidate, previous_generation = shop.live(), shop.previous()
    shop.tell(shop.second, "roll-back", *WHY)
    shop.follow(previous_generation)
    shop.tell(shop.first, "verify", candidate)

    shop.tell(shop.first, "canary", "start", candidate, "--percent", "50")
    assert until(lambda: {(shop.view(n)["next"] or {}).get("generation") for n in BOTH} == {candidate})
    users = shop.users(20)
    generations_by_release = {
        name: [shop.get(name, f"/v1/lookup/user_topk/{user}")["generation"] for user in users] for name in BOTH
    }
    assert generations_by_release["old"] == generations_by_release["new"] and set(generations_by_release["new"]) == {
        candidate,
        previous_generation,
    }

    shop.tell(shop.second, "canary", "abandon", *WHY)
    assert until(lambda: all(shop.view(name)["canary"] is None for name in BOTH))
    publish_again(shop, shop.first, candidate)


@pytest.mark.storm
def test_what_one_refused_passes_by_the_other_s_override(shop: Shop) -> None:
    live, previous_generation = shop.live(), shop.previous()
    shop.tell(shop.second, "roll-back", *WHY)
    shop.follow(previous_generation)
    refused = shop.refusal(shop.second, "verify", live, settings="strict")

    shop.tell(shop.first, "override", live, "--rule", rule_of(refused), *WHY)

    shop.tell(shop.second, "verify", live, settings="strict")
    shop.tell(shop.first, "publish", live)
    shop.follow(live)


def test_one_blocks_for_both_and_the_other_lifts_it(shop: Shop) -> None:
    body = {"entities": [{"id": shop.users(1)[0]}]}

    def lists() -> list[list[str]]:
        return [shop.ask(name, "user_topk", body)[0]["items"] for name in BOTH]

    top = lists()[0][0]
    shop.tell(shop.first, "block", "--item", top)
    assert until(lambda: all(top not in items for items in lists()))

    shop.tell(shop.second, "unblock", "--item", top)
    assert until(lambda: all(items[0] == top for items in lists()))


def test_one_erases_and_the_other_knows_and_may_forget(shop: Shop) -> None:
    user = shop.users(1)[0]

    def sources() -> set[str]:
        body = {"entities": [{"id": user}]}
        return {shop.ask(name, "user_topk", body)[0]["source"] for name in BOTH}

    shop.tell(shop.first, "erase", user)
    assert until(lambda: sources() == {"default"})
    assert user in shop.tell(shop.second, "erase", "--list")

    shop.tell(shop.second, "erase", user, "--forget", *WHY)
    assert until(lambda: sources() <= {"l1", "l2"})


def test_one_restores_a_redis_that_was_lost(shop: Shop) -> None:
    live = shop.live()
    with shop.redis() as client:
        client.flushall()
    assert until(lambda: all(shop.ready(name)["stale"] for name in BOTH))

    shop.tell(shop.first, "restore")

    shop.follow(live)
    body = {"entities": [{"id": user} for user in shop.users(40)[20:]]}
    for name in BOTH:
        assert {answer["source"] for answer in shop.ask(name, "user_vector", body)} <= {"l1", "l2"}


def test_each_sees_both_replicas_well(shop: Shop) -> None:
    for release in (shop.first, shop.second):
        completed_process = release.run("precompute", "status", "--json", environ=shop.environ())
        assert completed_process.stdout.count('"overlay_ttl_s"') == 2 or completed_process.stdout.count('"epoch"') >= 2
        assert "cannot load" not in completed_process.stdout and "answers from" not in completed_process.stdout
