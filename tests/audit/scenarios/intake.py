"""Events by every way in, what is refused, what is forgotten, and earlier answers made again."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from tests.audit.checker import PROMISES, EntityLookup
from tests.audit.processes import wait_until
from tests.audit.reference import Event, Input, Rules
from tests.audit.scenarios.stage import Stage
from tests.audit.shop import FILTERS, Shape, Shop
from tests.audit.values import Json

EVENTS = "docs/how-to/send-events.md: "
ERASE = "docs/how-to/erase-somebody.md: "
LEASE_S = 60
"""Seconds that tell a stored answer from a lease, by what is left of its life."""
OVERLAY_TTL_S = 600
MISSING_KEY_TTL = -2
"""Answer of Redis to TTL of a key that is not there."""
SECRET = "somebody-9f3a71"
"""Id of a user that is erased: long enough to be searched for in bytes."""


def run_intake(stage: Stage) -> None:
    """Rejected and repeated events, the inbox, earlier answers, lost Redis servers, erasure."""
    rng = random.Random(f"intake {stage.seed}")
    rules = Rules(history_limit=9, filters=FILTERS, facets={"brands": "brand", "tagged": "tags"})
    shop = Shop.make(
        stage.folder / "intake",
        stage.servers,
        stage.report,
        stage.seed,
        Shape(users=100, items=80, interactions_of_one=20, with_vectors=rng.random() < 0.5),
        "intake",
        settings={"events": "of_one = 20"},
        rules=rules,
    )
    world = shop.world
    world.users = (*world.users, SECRET)
    world.countries[SECRET] = 2
    for item in rng.sample(list(world.items), 6):
        world.clock += 5
        world.interactions.append(replace(world.interactions[0], user=SECRET, item=item, time=world.clock, weight=1.0))
    shop.night()
    shop.serve()
    try:
        _try_rejections(stage, shop)
        _try_repeats(stage, shop, rng)
        _try_inbox(stage, shop, rng)
        for _ in range(40):
            shop.ask_once(rng)
        _try_as_of(stage, shop, rng)
        _lose_events(stage, shop, rng)
        shop.world.draw_interactions(rng, 10)
        shop.night()
        for _ in range(40):
            shop.ask_once(rng)
        _try_erasure(stage, shop, rng)
        for _ in range(20):
            shop.ask_once(rng)
        shop.compare_metrics()
    finally:
        shop.close()


def _try_rejections(stage: Stage, shop: Shop) -> None:
    item = next(iter(shop.world.items))
    events_and_reasons: list[tuple[Json, str | None]] = [
        ({"user": "r1", "item": item, "id": "r1"}, None),
        ({"user": "r1", "item": item, "id": "r2", "time": time.time() + 86_400}, "in_future"),
        ({"user": "r1", "item": item}, "missing_field"),
        ({"user": "r1", "id": "r3"}, "missing_field"),
        ({"user": "r1", "item": item, "id": "r4", "colour": "red"}, "unknown_field"),
        ({"user": "r1", "item": item, "id": "r5", "weight": "much"}, "invalid_field"),
        ({"user": "r1", "item": item, "id": "r6", "type": ""}, "invalid_field"),
        ({"user": "r1", "item": "x" * 300, "id": "r7"}, "invalid_id"),
        ({"user": "r1", "item": item, "id": "r8", "time": time.time() + 200}, None),
        ({"item": "unfit", "id": "r9", "features": {"lift": 1.0}}, "unfit_item"),
        ({"user": "r1", "item": item, "id": "r10", "attributes": {"price": 1}}, "invalid_field"),
    ]
    reply = shop.client.events([event for event, _ in events_and_reasons])
    reason_by_index = (
        {rejection["index"]: rejection["reason"] for rejection in reply.body["rejected"]}
        if reply.status == 202
        else reply.body
    )
    expected = {index: reason for index, (_, reason) in enumerate(events_and_reasons) if reason is not None}
    if reply.status == 202:
        differing = {
            index for index in expected if index in reason_by_index and reason_by_index[index] != expected[index]
        }
        for index in differing:
            stage.report.count(f"undecided: rejection {expected[index]} told as {reason_by_index[index]}")
        stage.require(
            set(reason_by_index) == set(expected),
            "events rejected",
            EVENTS + "Each event is accepted or rejected by itself",
            expected,
            reply.body,
            shop.client.recent[-1:],
        )
        for index, (event, _) in enumerate(events_and_reasons):
            if index not in reason_by_index:
                shop.log_event(event, reply.body["position"], time.time())
        shop.knowledge.change()
    flood_events = [{"user": "flood", "item": item, "id": f"flood {number}"} for number in range(25)]
    reply = shop.client.events(flood_events)
    reasons = [rejection["reason"] for rejection in reply.body["rejected"]]
    stage.require(
        reasons == ["too_many"] * 5 and reply.body["accepted"] == 20,
        "too many",
        EVENTS + "`too_many` (more than `of_one` events of one user within `keep_s`)",
        {"accepted": 20, "rejected": 5},
        reply.body,
        shop.client.recent[-1:],
    )
    for event in flood_events[:20]:
        shop.log_event(event, reply.body["position"], time.time())
    shop.knowledge.change()


def _try_repeats(stage: Stage, shop: Shop, rng: random.Random) -> None:
    """An event that is sent again, in another request or the same, counts once."""
    events = [event for event in shop.draw_events(rng, 12) if "user" in event and "item" in event]
    shop.send_events(events)
    reply = shop.client.events(events)
    stage.require(
        reply.status == 202 and (reply.body["accepted"], reply.body["repeated"]) == (0, len(events)),
        "repeated",
        EVENTS + "Sending again is safe: events that were accepted already count as `repeated`",
        {"accepted": 0, "repeated": len(events)},
        reply.body,
        shop.client.recent[-2:],
    )
    for user in {event["user"] for event in events}:
        shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input(user)))
    twice = {"user": rng.choice(shop.world.users), "item": shop.draw_item(rng), "id": f"twice {rng.random()}"}
    reply = shop.client.events([twice, twice])
    stage.require(
        reply.status == 202 and (reply.body["accepted"], reply.body["repeated"]) == (1, 1),
        "repeated",
        EVENTS + "A second event with the same id and user is a repetition and does not count",
        {"accepted": 1, "repeated": 1},
        reply.body,
        shop.client.recent[-1:],
    )
    shop.log_event(twice, reply.body["position"], time.time())
    shop.knowledge.change()
    shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input(twice["user"])))


def _try_inbox(stage: Stage, shop: Shop, rng: random.Random) -> None:
    """Entries of the inbox are taken in by the same rules, and removed."""
    key = f"larder:1:{{{shop.namespace}}}:events:inbox"
    untagged_key = f"larder:1:{shop.namespace}:events:inbox"
    events = [event for event in shop.draw_events(rng, 10) if "user" in event and "item" in event]
    redis = shop.servers.events
    lengths = [redis.command("EXISTS", name) for name in (key, untagged_key)]
    name = untagged_key if lengths[1] == b":1\r\n" else key
    for event in events:
        fields = [part for pair in event.items() for part in (pair[0], str(pair[1]))]
        redis.command("XADD", name, "*", *fields)
        shop.log_event({**event, "weight": float(event.get("weight", 1.0))}, "", time.time())
    shop.knowledge.change()
    try:
        wait_until(lambda: redis.command("XLEN", name) == b":0\r\n", 10, "the inbox is empty", 0.05)
    except AssertionError as error:
        stage.report.violate(
            "inbox", EVENTS + "Workers read them by the same rules, and remove them", name, str(error), []
        )
    shop.knowledge.change()
    for event in events:
        shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input(event["user"])))
    stage.report.count("events by the inbox", len(events))


def _try_as_of(stage: Stage, shop: Shop, rng: random.Random) -> None:
    """An earlier answer, asked for by its position or time, is made again."""
    knowledge = shop.knowledge
    users = [user for user in shop.world.users if user not in knowledge.blocked_users][:6]
    earlier: list[tuple[str, str, str, list[str], list[float]]] = []
    for _ in range(3):
        clicks: list[Json] = [
            {"user": user, "item": shop.draw_item(rng), "id": f"as of {user} {rng.random()}"} for user in users
        ]
        receipt = shop.send_events(clicks)
        wait_until(knowledge.is_settled, 5, "the events have travelled", 0.1)
        for user in users:
            answers = shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input(user), k=5))
            if answers and "events" in answers[0]:
                answer = answers[0]
                earlier.append((user, receipt["position"], answer["as_of"], answer["items"], answer["scores"]))
    for user, position, as_of, items, scores in earlier:
        for moment in (position, as_of):
            reply = shop.client.lookup("user_topk", [user], k=5, as_of=moment)
            if reply.status != 200:
                stage.report.violate("as of", PROMISES["events"], 200, reply.body, shop.client.recent[-1:])
                continue
            answer = reply.body["answers"][0]
            knowledge.answered[answer["table"], answer["source"]] += 1
            if "reason" in answer and answer["source"] not in ("l1", "l2"):
                knowledge.reasons[answer["table"], answer["reason"]] += 1
            if "events" in answer:
                knowledge.with_events[answer["table"]] += 1
            is_same_answer = (answer["items"], answer["scores"]) == (items, scores)
            stage.report.count("earlier answers made again")
            stage.require(
                is_same_answer or answer.get("approximate") is True,
                "as of",
                "docs/reference/http-api.md: `as_of=` ... makes an earlier answer again while its events are kept",
                [items, scores],
                answer,
                shop.client.recent[-1:],
            )


def _lose_events(stage: Stage, shop: Shop, rng: random.Random) -> None:
    """While the Redis of events is away, events get 503 and lookups go on; nothing accepted is lost."""
    shop.servers.events.stop()
    reply = shop.client.events([{"user": "x", "item": "y", "id": "lost 1"}])
    stage.require(
        (reply.status, reply.code) == (503, "events_unavailable"),
        "events unavailable",
        EVENTS + "with 503 `events_unavailable` if the Redis of events is away",
        503,
        [reply.status, reply.body],
        ["kill the Redis of events", *shop.client.recent[-1:]],
    )
    shop.knowledge.events_away = True
    for _ in range(10):
        shop.ask_once(rng)
    shop.servers.events.start()

    def is_taken() -> bool:
        return shop.client.events([{"user": "x", "item": "y", "id": "lost 1"}]).status == 202

    wait_until(is_taken, 20, "events are taken in again", 0.1)
    shop.knowledge.events.append(Event("lost 1", "", time.time(), "x", "y"))
    shop.knowledge.change()
    stage.report.count("losses of the Redis of events")
    wait_until(shop.knowledge.is_settled, 6, "the replica has caught up", 0.1)
    shop.knowledge.events_away = False
    for _ in range(15):
        shop.ask_once(rng)


def _keys(shop: Shop, pattern: str) -> set[str]:
    """Return the keys of the Redis of pages that match."""
    reply = shop.servers.pages.command("EVAL", "return redis.call('KEYS', ARGV[1])", "0", pattern)
    lines = reply.decode("utf-8", "replace").split("\r\n")
    return {line for line in lines if line and line[0] not in "*$"}


def _wait_for_overlays(shop: Shop, pattern: str, keys_before: set[str]) -> set[str]:
    """Wait until live answers are stored; return their keys."""
    wait_until(lambda: bool(_keys(shop, pattern) - keys_before), 5, "a live answer is stored", 0.05)
    redis = shop.servers.pages
    return {key for key in _keys(shop, pattern) - keys_before if int(redis.command("TTL", key)[1:-2]) > LEASE_S}


def _require_gone(stage: Stage, shop: Shop, rule: str, overlays: set[str], keys: set[str]) -> None:
    stage.require(
        not overlays & keys,
        rule,
        ERASE + "deletes the overlays under its id",
        "none of these keys",
        sorted(overlays & keys),
        [*shop.client.recent[-8:], "larder erase USER; then read the keys larder:1:NS:w:* of the Redis of pages"],
    )


def _try_erasure(stage: Stage, shop: Shop, rng: random.Random) -> None:
    """Who is erased is blocked at once, forgotten by the next nights, and nothing of it stays behind."""
    stranger = f"stranger-{SECRET}"
    pattern = f"larder:1:*{shop.namespace}*:w:*"
    keys_before = _keys(shop, pattern)
    history = tuple(list(shop.world.items)[:4])
    for user in (stranger, SECRET):
        shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input(user, history, 3)))
    overlays_before_events = _wait_for_overlays(shop, pattern, keys_before)
    shop.send_events(
        [{"user": user, "item": shop.draw_item(rng), "id": f"erase {user}"} for user in (stranger, SECRET)]
    )
    wait_until(shop.knowledge.is_settled, 5, "the events have travelled", 0.1)
    shop.erase(stranger)
    _require_gone(stage, shop, "erased overlays", overlays_before_events, _keys(shop, pattern))
    shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input(SECRET, history, 3)))
    shop.checker.judge_lookups(shop.client, EntityLookup("user_vector", Input(SECRET, history, 3)))
    with_events = _wait_for_overlays(shop, pattern, keys_before | overlays_before_events)
    stage.report.count("overlays of who is erased", len(overlays_before_events | with_events))
    shop.erase(SECRET)
    shop.erase(next(item for item in shop.world.items if item not in shop.knowledge.erased_items), as_item=True)
    lives_s = [int(shop.servers.pages.command("TTL", key)[1:-2]) for key in sorted(with_events)]
    stage.require(
        all(life_s == MISSING_KEY_TTL or 0 <= life_s <= OVERLAY_TTL_S for life_s in lives_s),
        "life of answers with events of who is erased",
        ERASE + "expires within the service's `overlay_ttl_s` (ten minutes)",
        f"at most {OVERLAY_TTL_S} s",
        lives_s,
        ["larder erase USER; then read the TTL of the keys larder:1:NS:w:* of the Redis of pages"],
    )
    for user in (stranger, SECRET):
        for table in ("user_topk", "user_vector", "mood"):
            shop.checker.judge_lookups(shop.client, EntityLookup(table, Input(user)))
    shop.send_events([{"user": SECRET, "item": shop.draw_item(rng), "id": "after the erasure"}])
    stream = shop.servers.events.command("EVAL", _SEARCH, "0", SECRET)
    stage.require(
        stream == b"*0\r\n",
        "erased events",
        ERASE + "its events are deleted from the stream",
        "no entry of a stream that names the user",
        stream.decode("utf-8", "replace"),
        ["larder erase USER; read all streams of the Redis of events"],
    )
    for _ in range(3):
        shop.world.draw_interactions(rng, 8)
        shop.world.interactions[shop.world.written :] = [
            row for row in shop.world.interactions[shop.world.written :] if row.user != SECRET
        ]
        shop.night()
    _search_store(stage, shop)
    reply = shop.site.run("erase", SECRET, "--status", check=False)
    stage.report.count("erasures followed to their end")
    stage.require(
        "done" in reply.output.lower() or "nothing" in reply.output.lower(),
        "erasure done",
        ERASE + "The first `retire` after the last of them is gone reports the erasure as done",
        "done",
        reply.output + reply.errors,
        [f"larder erase {SECRET}, three nights, larder erase {SECRET} --status"],
    )


_SEARCH = """
local hits = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  if redis.call('TYPE', key).ok == 'stream' then
    for _, entry in ipairs(redis.call('XRANGE', key, '-', '+')) do
      for _, part in ipairs(entry[2]) do
        if string.find(part, ARGV[1], 1, true) then hits[#hits + 1] = key .. ' ' .. entry[1] end
      end
    end
  end
end
return hits
"""


def _search_store(stage: Stage, shop: Shop) -> None:
    """Search every file of the store for the id; records of the erasure may name it."""
    store = shop.folder / "store"
    hits = []
    for path in store.rglob("*"):
        name = str(path.relative_to(store))
        is_record = any(name_part in name for name_part in ("erasure", "blocklist", "audit/", "erase"))
        if path.is_file() and not is_record and SECRET.encode() in path.read_bytes():
            hits.append(name)
    stage.require(
        not hits,
        "erased files",
        ERASE + "its events are deleted from the stream and from the files that nights took over; "
        "from the next night on, its interactions and its features are left out",
        "no file with the id",
        hits,
        ["larder erase USER, three nights, then search the store for the id"],
    )
