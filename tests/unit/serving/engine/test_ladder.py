"""The ladder: which source answers, what is left out, what is kept, and that the counts add up."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.errors import TierUnavailable
from cache.store.blocklist import Blocklist
from serving.engine.entity import PendingAnswer
from serving.engine.ladder import Ladder
from serving.engine.rendering.answer_fields import prediction_from_record
from serving.generations.served_set import ServedGenerations
from serving.requests.answers import Source
from serving.requests.errors import Problem
from tests.unit.serving.world import DATA_UNTIL, GENERATION, OLDER, USERS, WIDTH, World, ask, entity, ids, night_list


@pytest.fixture
def world() -> World:
    return World()


def get_loop_time() -> float:
    return asyncio.get_running_loop().time()


async def look_up(world: World, served: ServedGenerations, *entities, **options):
    return await world.ladder.lookup(served, ask(*entities, **options), get_loop_time())


def counts(world: World, name: str) -> dict[tuple[str, ...], float]:
    metric = getattr(world.metrics, name)
    return {
        tuple(sample.labels.values()): sample.value
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def test_a_stored_answer_comes_from_l2_and_then_from_l1(world: World) -> None:
    served = ServedGenerations(world.snapshot())

    first, second = (
        (await look_up(world, served, entity("u3"), k=2))[0],
        (await look_up(world, served, entity("u3"), k=2))[0],
    )

    assert first["items"] == world.ids(night_list("u3")[:2]) and not first["short"]
    assert (first["source"], second["source"]) == ("l2", "l1")
    assert first["producer"] == "batch" and first["generation"] == GENERATION
    assert first["age_seconds"] == 3600 and "reason" not in first


async def test_every_user_of_the_night_whom_redis_answers_counts_as_read(world: World) -> None:
    # Given all users of the night, including the first of its directory
    served, reads = ServedGenerations(world.snapshot()), list[bool]()
    world.ladder.observer.count_read = lambda *read: reads.append(read[-1])  # type: ignore[method-assign]

    # When Redis answers them
    answers = await look_up(world, served, *(entity(user) for user in USERS))

    # Then all of them are known to the night
    assert {answer["source"] for answer in answers} == {"l2"}
    assert reads == [True] * len(USERS)


async def test_an_unknown_id_without_input_gets_defaults_that_are_never_kept(world: World) -> None:
    served = ServedGenerations(world.snapshot())

    answers = [(await look_up(world, served, entity("nobody")))[0] for _ in range(2)]
    vector = (await look_up(world, served, entity("nobody", "user_vector")))[0]

    # The second request still gets a default, and nothing was written.
    assert [answer["source"] for answer in answers] == ["default"] * 2
    assert [answer["reason"] for answer in answers] == ["not_in_generation"] * 2
    assert vector["vector"] is None and vector["source"] == "default"
    assert not world.remote.writes and len(world.tiers.local_tier) == 0 and not world.jobs


async def test_an_unknown_id_with_a_history_is_computed_once_and_then_stored(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    new = entity("nobody", history=ids("i1", "not-an-item"))

    first = (await look_up(world, served, new))[0]
    second = (await look_up(world, served, new))[0]

    assert (first["source"], second["source"]) == ("live", "l1")
    assert first["producer"] == second["producer"] == "live"
    assert first["dropped_history"] == 1 and first["reason"] == "not_in_generation"
    assert "i1" not in first["items"] and len(world.jobs) == 1
    await world.tiers.aclose()
    assert len(world.remote.writes) == 1


async def test_an_input_without_an_id_is_answered_under_its_digest(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    nameless = entity(None, history=ids("i1"))

    first = (await look_up(world, served, nameless))[0]
    second = (await look_up(world, served, nameless))[0]

    assert first["id"] is None and (first["source"], second["source"]) == ("live", "l1")


async def test_another_input_for_the_same_unknown_id_is_a_miss_and_computed_anew(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    await look_up(world, served, entity("nobody", history=ids("i1")))

    answer = (await look_up(world, served, entity("nobody", history=ids("i2"))))[0]

    assert answer["source"] == "live" and answer["reason"] == "input_changed"
    assert len(world.jobs) == 2


async def test_callers_with_different_inputs_never_share_an_inference(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    first_entity, second_entity = entity("x", history=ids("i1")), entity("x", history=ids("i2"))

    answers = await asyncio.gather(
        *(
            look_up(world, served, requested_entity)
            for requested_entity in (first_entity, second_entity, first_entity, second_entity)
        )
    )

    # One inference per (key, input digest).
    lists = [tuple(call_answers[0]["items"]) for call_answers in answers]
    assert lists[0] == lists[2] != lists[1] == lists[3] and len(world.jobs) == 2


async def test_fresh_computes_although_stored_and_keeps_nothing_over_the_batch(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    known_user = entity("u3", history=ids("i7"))

    fresh = (await look_up(world, served, known_user, fresh=True))[0]
    after = (await look_up(world, served, known_user))[0]

    assert fresh["source"] == "live" and fresh["reason"] == "fresh"
    assert (after["source"], after["producer"]) == ("l2", "batch")
    await world.tiers.aclose()
    assert not world.remote.writes and len(world.tiers.local_tier) == 1


async def test_fresh_without_anything_to_compute_from_gets_what_is_stored(world: World) -> None:
    answer = (await look_up(world, ServedGenerations(world.snapshot()), entity("u3"), fresh=True))[0]

    assert answer["source"] == "l2" and answer["reason"] == "nothing_to_compute_from"


async def test_fresh_that_cannot_be_had_settles_for_what_is_stored(world: World) -> None:
    world.busy = True

    answer = (await look_up(world, ServedGenerations(world.snapshot()), entity("u3", history=ids("i7")), fresh=True))[0]

    assert answer["source"] == "l2" and answer["reason"] == "fresh_unavailable"
    assert answer["live"] == "busy"


async def test_an_answer_older_than_max_age_is_computed_anew_if_it_can_be(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    known_user = entity("u3", history=ids("i7"))

    old_enough = (await look_up(world, served, known_user, max_age_s=3600.0))[0]
    too_old = (await look_up(world, served, known_user, max_age_s=3599.0))[0]
    no_input = (await look_up(world, served, entity("u3"), max_age_s=3599.0))[0]

    assert old_enough["source"] == "l2" and "reason" not in old_enough
    assert too_old["source"] == "live" and too_old["reason"] == "too_old"
    assert no_input["source"] == "l1" and no_input["reason"] == "too_old"


async def test_history_exclusions_and_blocked_items_appear_from_no_source(world: World) -> None:
    blocked_item, excluded = night_list("u3")[0], world.ids(night_list("u3")[1:2])
    seen_items = world.ids(night_list("u3")[2:3])
    snapshot = world.snapshot(
        blocked_item_numbers=frozenset({blocked_item}),
        blocklist=Blocklist(1, frozenset(ids(*world.ids([blocked_item])))),
    )
    previous = world.snapshot(OLDER, blocked_item_numbers=frozenset({blocked_item}))
    exclusions = {*world.ids([blocked_item]), *excluded, *seen_items}
    options = {"exclude": ids(*excluded)}

    stored_answer = (
        await look_up(world, ServedGenerations(snapshot), entity("u3", history=ids(*seen_items)), **options)
    )[0]
    live = (await look_up(world, ServedGenerations(snapshot), entity("new", history=ids(*seen_items)), **options))[0]
    default = (await look_up(world, ServedGenerations(snapshot), entity("nobody"), **options))[0]
    del world.remote.pages[GENERATION, "user_topk", 0]
    older = (await look_up(world, ServedGenerations(snapshot, previous), entity("u4"), **options))[0]

    assert [answer["source"] for answer in (stored_answer, live, default, older)] == [
        "l2", "live", "default", "previous",
    ]  # fmt: skip
    assert not exclusions & set(stored_answer["items"]) and stored_answer["short"]
    assert not exclusions & set(live["items"])
    assert not (exclusions - set(seen_items)) & set(default["items"]) and len(default["items"]) == WIDTH
    assert not (exclusions - set(seen_items)) & set(older["items"])


async def test_a_blocked_entity_gets_defaults_or_null_even_with_a_history(world: World) -> None:
    snapshot = world.snapshot(blocklist=Blocklist(1, entities=frozenset(ids("u3"))))
    served = ServedGenerations(snapshot, world.snapshot(OLDER))
    history = ids("i1")

    top, vector = await look_up(
        world, served, entity("u3", history=history), entity("u3", "user_vector", history=history)
    )

    assert (top["source"], top["reason"]) == ("default", "entity_blocked")
    assert (vector["vector"], vector["reason"]) == (None, "entity_blocked")
    assert not world.jobs and not world.remote.calls


async def test_a_lost_redis_falls_to_live_then_previous_l1_then_defaults(world: World) -> None:
    previous = world.snapshot(OLDER)
    await look_up(world, ServedGenerations(previous), entity("u5"))  # warms the L1 of what is now previous
    served = ServedGenerations(world.snapshot(), previous)
    world.remote.fails_with = TierUnavailable("gone", reason="connection")

    answers = await look_up(world, served, entity("u3", history=ids("i1")), entity("u5"), entity("u4"))

    assert [answer["source"] for answer in answers] == ["live", "previous", "default"]
    assert [answer["reason"] for answer in answers] == ["l2_down"] * 3
    assert answers[1]["generation"] == OLDER


async def test_every_source_answers_what_those_before_it_cannot(world: World) -> None:
    live, previous, bare = world.snapshot(), world.snapshot(OLDER), world.snapshot(predictor=None)
    entities = [entity(name, history=ids("i1")) for name in ("u1", "u2", "u3", "u4")]
    await look_up(world, ServedGenerations(previous), *entities)  # warms the L1 of what is now previous
    served_with_previous = ServedGenerations(live, previous)

    answer_lists = [await look_up(world, served_with_previous, entities[0]) for _ in range(2)][
        ::-1
    ]  # of L2, and then of L1
    world.remote.fails_with = TierUnavailable("gone", reason="connection")
    for served, requested_entity in zip(
        (served_with_previous, ServedGenerations(bare, previous), ServedGenerations(bare)), entities[1:], strict=True
    ):
        answer_lists.append(await look_up(world, served, requested_entity))

    assert [answer["source"] for (answer,) in answer_lists] == list(Source)


async def test_previous_is_never_asked_for_an_overlay(world: World) -> None:
    served = ServedGenerations(world.snapshot(), world.snapshot(OLDER))
    await look_up(world, ServedGenerations(world.snapshot(OLDER)), entity("new", history=ids("i1")))

    answer = (await look_up(world, served, entity("new")))[0]

    assert answer["source"] == "default"
    assert all(read.generation == GENERATION for read in world.remote.calls[-1])


async def test_a_pinned_request_is_answered_by_that_generation_alone(world: World) -> None:
    served = ServedGenerations(world.snapshot(), world.snapshot(OLDER))

    answer = (await look_up(world, served, entity("u3"), generation=OLDER))[0]
    with pytest.raises(Problem) as refused:
        await look_up(world, served, entity("u3"), generation="20200101T000000Z-aaaaaaaaaaaa")

    assert (answer["generation"], answer["source"]) == (OLDER, "l2")
    assert (refused.value.status, refused.value.reason) == (409, "generation_gone")


async def test_one_missing_id_costs_the_others_of_its_batch_nothing(world: World) -> None:
    entities = [entity(name) for name in (*USERS, "nobody", "x" * 256)]

    answers = await look_up(world, ServedGenerations(world.snapshot()), *entities)

    # Each entity has an outcome of its own.
    assert [entity_row["id"] for entity_row in answers] == [entity_row.id for entity_row in entities]
    assert [answer["source"] for answer in answers] == ["l2"] * len(USERS) + ["default"] * 2
    assert len(world.remote.calls) == 1


async def test_sources_sum_to_entities_and_misses_to_what_was_not_stored(world: World) -> None:
    served = ServedGenerations(world.snapshot(), world.snapshot(OLDER))
    mixed = [entity(name) for name in ("u1", "u1", "nobody", "u2")]
    mixed += [entity("new", history=ids("i1"))] * 3 + [entity("u1", "user_affinity")]

    for _ in range(3):
        await look_up(world, served, *mixed)
    world.remote.fails_with = TierUnavailable("slow", reason="timeout")
    await look_up(world, served, *[entity(name) for name in USERS])

    # Each entity has one outcome, also those that joined another request's flight.
    total = 3 * len(mixed) + len(USERS)
    answered, missed = counts(world, "answers"), counts(world, "misses")
    assert sum(answered.values()) == sum(counts(world, "entities").values()) == total
    stored_count = sum(value for (_, source), value in answered.items() if source in ("l1", "l2"))
    assert sum(missed.values()) == total - stored_count


async def test_a_late_model_costs_the_caller_its_answer_not_its_deadline(world: World) -> None:
    class Stuck:
        async def infer(self, job: object) -> object:
            await asyncio.Event().wait()
            raise AssertionError

    world.inferences.batcher = Stuck()  # type: ignore[assignment]
    started = get_loop_time()

    answer = (
        await look_up(world, ServedGenerations(world.snapshot()), entity("x", history=ids("i1")), deadline_s=0.08)
    )[0]

    # The wait is bounded, and the flight ends with its last waiter.
    assert answer["source"] == "default" and answer["live"] == "timeout"
    assert get_loop_time() - started < 0.5
    await asyncio.sleep(0)
    assert len(world.inferences.flights) == 0


async def test_a_model_that_raises_leaves_every_entity_with_an_answer(world: World) -> None:
    world.predictor.fails_with = RuntimeError("CUDA error")
    served = ServedGenerations(world.snapshot(), world.snapshot(OLDER))

    answers = await look_up(world, served, entity("x", history=ids("i1")), entity("u1"), entity("y", history=ids("i2")))

    assert [answer["source"] for answer in answers] == ["default", "l2", "default"]
    assert answers[0]["live"] == "failed"


async def test_a_generation_without_a_model_still_answers_from_pages_and_defaults(world: World) -> None:
    served = ServedGenerations(world.snapshot(predictor=None, degraded_reason="broken"))

    answers = await look_up(world, served, entity("u1"), entity("x", history=ids("i1")))

    assert [answer["source"] for answer in answers] == ["l2", "default"]
    assert answers[1]["live"] == "no_model"


async def test_the_live_answer_of_one_generation_is_unknown_to_the_next(world: World) -> None:
    # The key of a written answer names the generation that the request captured.
    old, new = ServedGenerations(world.snapshot(OLDER)), ServedGenerations(world.snapshot())

    await look_up(world, old, entity("x", history=ids("i1")))
    answer = (await look_up(world, new, entity("x")))[0]
    await world.tiers.aclose()

    assert answer["source"] == "default"
    assert {write.generation for write in world.remote.writes} == {OLDER}


async def test_an_item_of_the_catalogue_is_its_own_input_while_redis_is_away(world: World) -> None:
    world.remote.fails_with = TierUnavailable("gone", reason="connection")
    similar = entity("i3", "item_similar")

    answers = [(await look_up(world, ServedGenerations(world.snapshot()), similar))[0] for _ in range(2)]

    assert [answer["source"] for answer in answers] == ["live", "l1"]
    assert "i3" not in answers[0]["items"] and len(world.jobs) == 1


async def test_default_neighbours_leave_out_the_item_itself(world: World) -> None:
    world.remote.fails_with = TierUnavailable("gone", reason="connection")
    popular = world.ids([0])[0]

    answer = (await look_up(world, ServedGenerations(world.snapshot(predictor=None)), entity(popular, "item_similar")))[
        0
    ]

    assert answer["source"] == "default" and popular not in answer["items"]


async def test_what_no_generation_could_answer_is_refused_before_any_tier_is_asked(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    wrong = [
        (ask(entity("u1", "nothing")), 404, "unknown_table"),
        (ask(entity("u1"), k=WIDTH + 1), 422, "invalid_k"),
        (ask(entity("u1", features={"height": 3})), 422, "invalid_input"),
        (ask(entity("u1", features={"age": "x"})), 422, "invalid_input"),
    ]

    for request, status, code in wrong:
        with pytest.raises(Problem) as refused:
            await world.ladder.lookup(served, request, get_loop_time())
        assert (refused.value.status, refused.value.reason) == (status, code)

    assert not world.remote.calls and not world.jobs
    assert not counts(world, "entities")
    assert world.clock() > DATA_UNTIL


async def test_a_record_of_another_format_is_a_miss_and_not_an_error(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    page = bytearray(world.remote.pages[GENERATION, "user_topk", 0])
    size = served.live.manifest.tables["user_topk"].layout.size_bytes
    for start in range(0, len(page), size):
        page[start + 14] = 2 << 4  # written by a program of the next format
    world.remote.pages[GENERATION, "user_topk", 0] = bytes(page)

    default_answer, live = await look_up(world, served, entity("u1"), entity("u2", history=ids("i1")))

    assert (default_answer["source"], default_answer["reason"]) == ("default", "corrupt")
    assert (live["source"], live["reason"]) == ("live", "corrupt")


async def test_inputs_that_never_repeat_cost_one_inference_and_one_read_per_request(world: World) -> None:
    served = ServedGenerations(world.snapshot())

    # All requests miss; L1 and its negative entries stay within their bounds.
    for number in range(150):
        await look_up(world, served, entity(f"x{number}", history=ids(f"i{number % 20}")))

    assert len(world.jobs) == len(world.remote.reads) == 150
    assert world.tiers.local_tier.size_bytes <= world.tiers.local_tier.max_bytes
    assert len(world.tiers.negative_cache) <= 100


def damaged(world: World, user: str, items: list[int]) -> bytes:
    """The page with another list in one record; fingerprint and format stay right."""
    layout = world.snapshot().manifest.tables["user_topk"].layout
    rows = np.frombuffer(world.remote.pages[GENERATION, "user_topk", 0], layout.dtype).copy()
    rows["items"][world.user_raws.index(user.encode())] = items
    return rows.tobytes()


async def test_a_damaged_record_costs_its_own_entity_the_answer_and_only_until_it_is_repaired(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    good = world.remote.pages[GENERATION, "user_topk", 0]
    world.remote.pages[GENERATION, "user_topk", 0] = damaged(world, "u3", [0xFFFFFFF0, 1, 2, 3, 4])
    entities = [entity("u3"), *(entity(name) for name in USERS if name != "u3")]

    damaged_answer, *other_answers = await look_up(world, served, *entities)
    world.remote.pages[GENERATION, "user_topk", 0] = good
    repaired = (await look_up(world, served, entity("u3")))[0]

    # And nothing of the damaged record stays in L1.
    assert (damaged_answer["source"], damaged_answer["reason"]) == ("default", "corrupt")
    assert {answer["source"] for answer in other_answers} == {"l2"}
    assert repaired["source"] == "l2" and "reason" not in repaired
    assert counts(world, "misses") == {("user_topk", "corrupt"): 1}


async def test_one_entity_whose_answer_cannot_be_built_costs_the_others_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fragile(snapshot, table, record, k, exclusions, filter_mask, reranker):
        if record.item_ordinals is not None and record.item_ordinals[0] == night_list("u3")[0]:
            raise IndexError("planted")
        return prediction_from_record(snapshot, table, record, k, exclusions, filter_mask, reranker)

    monkeypatch.setattr("serving.engine.answer_builder.prediction_from_record", fragile)
    served = ServedGenerations(world.snapshot(), world.snapshot(OLDER))

    answers = await look_up(world, served, *(entity(name) for name in ("u2", "u3", "u4")))

    assert [answer["source"] for answer in answers] == ["l2", "default", "l2"]
    assert answers[1]["reason"] == "corrupt"


async def test_a_live_answer_of_an_outage_says_so_and_ends_with_it(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    known_user = entity("u3", history=ids("i19"))
    world.remote.fails_with = TierUnavailable("gone", reason="connection")

    first, second = [(await look_up(world, served, known_user))[0] for _ in range(2)]
    world.remote.fails_with = None
    after = (await look_up(world, served, known_user))[0]

    assert (first["source"], first["reason"]) == ("live", "l2_down")
    assert (second["source"], second["producer"], second["reason"]) == ("l1", "live", "l2_down")
    assert (after["source"], after["producer"]) == ("l2", "batch") and "reason" not in after


async def test_unknown_history_is_reported_wherever_the_input_was_used(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    new = entity("new", history=ids("i1", "nope", "nope", "neither"))

    live, stored_answer = [(await look_up(world, served, new))[0] for _ in range(2)]
    useless = (await look_up(world, served, entity("new2", history=ids("nope"))))[0]
    unused = (await look_up(world, served, entity("u3", history=ids("nope"))))[0]

    assert (live["source"], stored_answer["source"]) == ("live", "l1")
    assert live["dropped_history"] == stored_answer["dropped_history"] == 2
    assert (useless["live"], useless["dropped_history"]) == ("no_usable_input", 1)
    assert unused["source"] == "l2" and "dropped_history" not in unused


@pytest.mark.parametrize("sent_input", ["history", "history and features", "features"])
async def test_a_known_user_is_answered_from_the_night_whatever_is_sent_and_however_little_is_left(
    world: World, sent_input: str
) -> None:
    served = ServedGenerations(world.snapshot(), world.snapshot(OLDER))
    stored_items = world.ids(night_list("u3"))
    history = ids(*stored_items[:3]) if "history" in sent_input else None
    features = {"age": 3} if "features" in sent_input else None
    user = entity("u3", history=history, features=features)
    remaining_items = stored_items[3:] if history else stored_items

    full_answer = (await look_up(world, served, user, k=WIDTH))[0]
    fewer = (await look_up(world, served, user, k=2))[0]
    empty_answer = (await look_up(world, served, user, k=2, exclude=ids(*stored_items)))[0]

    assert full_answer["items"] == remaining_items and full_answer["short"] == (len(remaining_items) < WIDTH)
    assert fewer["items"] == remaining_items[:2] and not fewer["short"]
    assert (empty_answer["items"], empty_answer["short"]) == ([], True)
    assert [answer["source"] for answer in (full_answer, fewer, empty_answer)] == ["l2", "l1", "l1"]
    assert not any("reason" in answer or "live" in answer for answer in (full_answer, fewer, empty_answer))
    assert not world.jobs


async def test_a_list_of_similar_items_used_up_by_a_history_goes_on_from_the_item_itself(world: World) -> None:
    served = ServedGenerations(world.snapshot())
    stored_items = (await look_up(world, served, entity("i3", "item_similar")))[0]["items"]
    seen_items = ids(*stored_items[:3])

    deeper = (await look_up(world, served, entity("i3", "item_similar", history=seen_items), k=4))[0]
    of_features = entity("i3", "item_similar", history=seen_items, features={"age": 3})
    features_answer = (await look_up(world, served, of_features, k=4))[0]
    world.busy = True
    busy = (await look_up(world, served, entity("i3", "item_similar", history=seen_items[:2]), k=4))[0]

    assert (deeper["source"], deeper["reason"]) == ("live", "exhausted")
    assert len(deeper["items"]) == 4 and not {*stored_items[:3], "i3"} & {*deeper["items"]}
    assert (features_answer["items"], features_answer["source"], features_answer["short"]) == (
        stored_items[3:],
        "l1",
        True,
    )
    assert (busy["source"], busy["reason"], busy["live"]) == ("l1", "exhausted", "busy")
    assert busy["items"] == stored_items[2:] and busy["short"]


async def test_a_strangers_list_of_which_nothing_is_left_gives_way_to_what_else_is_popular(world: World) -> None:
    served = ServedGenerations(world.snapshot(), world.snapshot(OLDER))
    new = entity("new", history=ids("i1"))

    live = (await look_up(world, served, new))[0]
    answers = [live, (await look_up(world, served, new, exclude=ids(*live["items"])))[0]]

    assert [answer["source"] for answer in answers] == ["live", "default"]
    assert answers[1]["reason"] == "exhausted"
    assert len(answers[1]["items"]) == WIDTH
    assert not {*live["items"]} & {*answers[1]["items"]}
    # The stored answer to the same input would only be the same, so it is not computed again.
    assert len(world.jobs) == 1
    answered = counts(world, "answers")
    assert sum(answered.values()) == 2
    assert sum(counts(world, "misses").values()) == 2


class FakeSeenItems:
    """Items that every user of the world had by the night."""

    def __init__(self, *ordinals: int) -> None:
        self.ordinals = np.array(ordinals, np.int64)

    def ordinals_of(self, position: int) -> NDArray[np.int64]:
        """The same of each."""
        assert position >= 0
        return self.ordinals


async def test_what_a_known_user_had_by_the_night_comes_back_from_no_rung(world: World) -> None:
    had_ordinals = night_list("u3")[:2]
    had_items = {*world.ids(had_ordinals)}
    live = world.snapshot(seen_items=FakeSeenItems(*had_ordinals))
    served, served_with_previous = (ServedGenerations(live), ServedGenerations(live, world.snapshot(OLDER)))
    key = (GENERATION, "user_topk", 0)
    page = world.remote.pages.pop(key)
    history = ids("i2")

    out_of_reach = (await look_up(world, served, entity("u3", history=history)))[0]
    blocked = dataclasses.replace(live, blocklist=Blocklist(users=frozenset([b"u3"])))
    unknown = (await look_up(world, ServedGenerations(blocked), entity("u3"), k=WIDTH))[0]
    previous = (await look_up(world, served_with_previous, entity("u4")))[0]
    world.remote.pages[key] = page
    fresh = (await look_up(world, served, entity("u3", history=history), fresh=True))[0]

    assert (out_of_reach["source"], out_of_reach["reason"]) == ("live", "page_missing")
    assert (previous["source"], fresh["source"]) == ("previous", "live")
    for answer in (out_of_reach, previous, fresh):
        assert not had_items & {*answer["items"]}, answer["source"]
    for answer in (out_of_reach, fresh):  # as many as a list has
        assert len(answer["items"]) == WIDTH
    assert unknown["items"] == world.ids(range(WIDTH))  # what was known of the blocked decides nothing


async def test_a_default_leaves_out_what_a_known_user_had(world: World) -> None:
    live = world.snapshot(seen_items=FakeSeenItems(0, 2))
    world.remote.pages.pop((GENERATION, "user_topk", 0))

    answer = (await look_up(world, ServedGenerations(live), entity("u3"), k=3))[0]

    assert answer["source"] == "default" and answer["items"] == world.ids([1, 3, 4])


async def test_a_large_request_lets_others_have_the_event_loop(world: World) -> None:
    served = ServedGenerations(world.snapshot(), world.snapshot(OLDER))
    iterations, lookup_done = 0, asyncio.Event()

    async def count_iterations() -> None:
        nonlocal iterations
        while not lookup_done.is_set():
            iterations += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_iterations())
    await look_up(world, served, *(entity(f"n{n}", history=ids("i1")) for n in range(640)))
    lookup_done.set()
    await counting

    # Building, reading, computing and answering 640 entities each yield to the loop about every 64 entities.
    assert iterations > 25


async def test_a_late_request_starts_no_inference(world: World) -> None:
    answers = await world.ladder.lookup(
        ServedGenerations(world.snapshot()),
        ask(*(entity(f"n{n}", history=ids("i1")) for n in range(3)), deadline_s=0.0),
        get_loop_time(),
    )

    assert [(answer["source"], answer["live"]) for answer in answers] == [("default", "timeout")] * 3
    assert not world.jobs


async def test_the_time_for_l2_grows_with_the_batch(world: World) -> None:
    deadlines: list[float] = []
    read = world.tiers.get_many

    async def note_deadline(view, record_keys, deadline, **_options):
        deadlines.append(deadline)
        return await read(view, record_keys, get_loop_time() + 60.0)

    world.tiers.get_many = note_deadline  # type: ignore[method-assign]
    ladder = Ladder(world.tiers, world.inferences, world.metrics, l2_deadline_s=0.05, monotonic_clock=lambda: 10.0)
    for size in (1, 1_000):
        await ladder.lookup(ServedGenerations(world.snapshot()), ask(*[entity("u1")] * size), request_started_at=10.0)

    assert deadlines == pytest.approx([10.05, 10.15], abs=0.001)


def test_an_input_weighs_what_its_features_weigh(world: World) -> None:
    def weight(**fields: Any) -> int:
        requested_entity = entity("a", **fields)
        return PendingAnswer(
            requested_entity,
            world.snapshot().table("user_topk"),
            1,
            None,  # type: ignore[arg-type]
            b"",
        ).input_size_bytes

    assert weight(features={"text": "x" * 4_000}) > 4_000
    assert weight(features={"vector": (0.5,) * 1_000}) > 8_000
    assert weight(history=ids("i1"), features={"age": 3}) > weight(history=ids("i1"))
