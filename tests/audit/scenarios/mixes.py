"""Random questions beside everything that can be done to a shop."""

from __future__ import annotations

import random
import signal

from tests.audit.checker import EntityLookup
from tests.audit.reference import Input
from tests.audit.scenarios.stage import Stage
from tests.audit.shop import Shape, Shop


def run_mix(stage: Stage) -> None:
    """Random questions beside every change there is: events, nights, blocks, restarts, losses."""
    rng = random.Random(f"mix {stage.seed}")
    shape = Shape(users=rng.choice([100, 200, 300]), items=rng.choice([80, 150, 400]), with_vectors=rng.random() < 0.5)
    shop = Shop.make(stage.folder / "mix", stage.servers, stage.report, stage.seed, shape, f"mix-{stage.seed}")
    shop.night()
    shop.serve()
    try:
        while not stage.is_over():
            for _ in range(25):
                shop.ask_once(rng, [shop.live, *([shop.previous] if shop.previous else [])])
            change_something(shop, rng)
        shop.compare_metrics()
    finally:
        shop.close()


def change_something(shop: Shop, rng: random.Random) -> None:
    """Do one random thing to the shop."""
    kind = rng.choices(
        ["events", "night", "block", "unblock", "erase", "restart", "loss", "roll back", "metrics"],
        [40, 12, 7, 5, 3, 4, 3, 3, 5],
    )[0]
    know = shop.knowledge
    if kind == "events":
        shop.send_events(shop.draw_events(rng, rng.randrange(1, 12)))
    elif kind == "night":
        shop.world.draw_interactions(rng, rng.randrange(1, 30))
        if rng.random() < 0.5:
            shop.world.change_items(rng, 1)
        shop.night()
    elif kind == "block":
        if rng.random() < 0.7:
            shop.block(item=rng.choice(list(shop.world.items)))
        else:
            shop.block(user=rng.choice(shop.world.users))
    elif kind == "unblock":
        items = sorted(know.blocked_items - know.erased_items)
        users = sorted(know.blocked_users - shop.erased_users)
        if items:
            shop.unblock(item=rng.choice(items))
        elif users:
            shop.unblock(user=rng.choice(users))
    elif kind == "erase":
        if rng.random() < 0.5:
            shop.erase(rng.choice(shop.world.users))
        else:
            shop.erase(rng.choice(list(shop.world.items)), as_item=True)
    elif kind == "restart":
        shop.restart(rng.choice([signal.SIGTERM, signal.SIGKILL]))
    elif kind == "roll back":
        shop.roll_back()
    elif kind == "loss":
        lose_pages(shop, rng)
    else:
        shop.compare_metrics()


def lose_pages(shop: Shop, rng: random.Random) -> None:
    """Kill the Redis of pages, ask, start it empty, restore, and ask again."""
    shop.servers.pages.stop()
    shop.knowledge.impaired = True
    for _ in range(10):
        shop.ask_once(rng)
    shop.servers.pages.start()
    shop.site.run("restore")
    shop.knowledge.change("the Redis of pages came back empty and was restored")
    shop.report.count("losses of the Redis of pages")
    for _ in range(5):
        shop.ask_once(rng)
    while not shop.knowledge.is_settled():
        shop.ask_once(rng)
    shop.knowledge.impaired = False


def ask_with_events_out_of_order(shop: Shop, rng: random.Random) -> None:
    """Send events of a stranger, the later one first, and ask with a history: it counts before them, in their order."""
    # Items that the model does not know change no vector.
    items = rng.sample([item for item in shop.world.items if item in shop.model.vocabulary], 6)
    shop.send_events(
        [
            {"user": "late news", "item": items[0], "id": "late news 0", "time": shop.world.clock + 20},
            {"user": "late news", "item": items[1], "id": "late news 1", "time": shop.world.clock + 10},
        ]
    )
    for sent_items in ((), items[2:4], items[2:]):
        shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input("late news", tuple(sent_items), 1)))


SMALL_SEEDS = 5


def run_small(stage: Stage) -> None:
    """Five small seeds over one shop: two nights, events, a block, and questions of every route."""
    shape = Shape(users=80, items=80, interactions_of_one=8, with_vectors=True)
    shop = Shop.make(stage.folder / "small", stage.servers, stage.report, stage.seed, shape, "small")
    shop.serve_early()
    try:
        shop.night()
        ask_with_events_out_of_order(shop, random.Random(f"order {stage.seed}"))
        for seed in range(stage.seed, stage.seed + SMALL_SEEDS):
            rng = random.Random(f"small {seed}")
            if seed == stage.seed + 2:
                shop.block(item=rng.choice(list(shop.world.items)), user=rng.choice(shop.world.users))
            if seed == stage.seed + 3:
                shop.world.draw_interactions(rng, 20)
                shop.world.change_items(rng, 1)
                shop.night()
            shop.send_events(shop.draw_events(rng, 8))
            for _ in range(32):
                shop.ask_once(rng, [shop.live])
        shop.compare_metrics()
    finally:
        shop.close()
