"""Canaries and experiments: which generation answers which keys."""

from __future__ import annotations

import random
import signal
from dataclasses import replace

from tests.audit.checker import EntityLookup
from tests.audit.processes import wait_until
from tests.audit.reference import Input
from tests.audit.scenarios.stage import Stage
from tests.audit.shop import Shape, Shop
from tests.audit.values import Json

CANARY = "docs/how-to/release-safely.md: sends a stable share of the requests to a verified generation"
EXPERIMENT = "docs/how-to/run-an-experiment.md: "
PERCENT = 50


def run_canary(stage: Stage) -> None:
    """A canary during events, a block and a restart; it is abandoned, started again and published."""
    rng = random.Random(f"canary {stage.seed}")
    shape = Shape(users=120, items=80, with_vectors=rng.random() < 0.5)
    shop = Shop.make(stage.folder / "canary", stage.servers, stage.report, stage.seed, shape, "canary")
    shop.night()
    shop.serve()
    try:
        live = shop.live
        shop.world.draw_interactions(rng, 60)
        shop.world.change_items(rng, 3)
        trial = shop.night("--until", "verify").id
        _start_canary(shop, trial)
        arms: dict[str, str] = {}
        _ask_keys(stage, shop, rng, arms)
        canary_share = sum(id_ == trial for id_ in arms.values()) / len(arms)
        stage.require(
            0.3 < canary_share < 0.7, "canary share", CANARY, PERCENT / 100, {"share": canary_share, "keys": len(arms)}
        )
        _ask_without_key(stage, shop, live)
        _send_feedback(stage, shop, arms, trial)
        shop.send_events(shop.draw_events(rng, 8))
        shop.block(item=rng.choice(list(shop.world.items)), user=rng.choice(shop.world.users))
        _ask_keys(stage, shop, rng, arms)
        shop.restart(rng.choice([signal.SIGTERM, signal.SIGKILL]))
        _wait_for_canary(shop, trial)
        _ask_keys(stage, shop, rng, arms)
        shop.site.run("canary", "abandon", "--reason", "audit")
        _wait_for_canary(shop, None)
        shop.knowledge.allowed = {live}
        for _ in range(30):
            shop.ask_once(rng)
        shop.site.run("verify", trial)
        _start_canary(shop, trial)
        _ask_keys(stage, shop, rng, arms, count=20)
        shop.site.run("canary", "publish")
        shop.follow(trial)
        for _ in range(40):
            shop.ask_once(rng)
        shop.compare_metrics()
    finally:
        shop.close()


def _start_canary(shop: Shop, trial: str) -> None:
    shop.site.run("canary", "start", trial, "--percent", str(PERCENT))
    _wait_for_canary(shop, trial)
    shop.knowledge.allowed = {shop.live, trial}
    shop.report.count("canaries")
    if not shop.knowledge.generations[trial].order:
        shop.checker.learn_order(shop.client, trial)


def _wait_for_canary(shop: Shop, trial: str | None) -> None:
    def is_as_wanted() -> bool:
        body = shop.client.send("GET", "/v1/generations").body
        canary = (body.get("canary") or {}).get("generation")
        next_generation = (body.get("next") or {}).get("generation")
        return bool(canary == trial and (trial is None or next_generation == trial))

    wait_until(is_as_wanted, 20, f"the canary is {trial}", 0.1)
    shop.knowledge.change()


def _ask_keys(stage: Stage, shop: Shop, rng: random.Random, arms: dict[str, str], count: int = 60) -> None:
    """Look up as users and with keys; each key must get the same generation as before."""
    for _ in range(count):
        user = rng.choice(shop.world.users)
        key_source = rng.choice(["user", "body", "query", "header", "get"])
        lookup = replace(shop.draw_ask(rng), entity=Input(user), exclude=(), generation=None)
        key = user
        if key_source == "user":
            answers = shop.checker.judge_lookups(shop.client, lookup)
        elif key_source == "get":
            answers = shop.checker.judge_lookups(shop.client, lookup, route="get")
        else:
            key = user if rng.random() < 0.3 else f"key {rng.randrange(60)}"
            entities = [Input(rng.choice(shop.world.users)) for _ in range(3)]
            if key_source == "body":
                asks = [replace(lookup, entity=entity, canary_key=key) for entity in entities]
                answers = shop.checker.judge_lookups(shop.client, *asks)
            elif key_source == "query":
                answers = shop.checker.judge_lookups(shop.client, replace(lookup, canary_key=key), route="get")
            else:
                reply = shop.client.send(
                    "POST",
                    "/v1/lookup/user_topk",
                    {"entities": [entity.body() for entity in entities], "k": 3},
                    {"X-Larder-Canary-Key": key.encode().decode("latin-1") if key.isascii() else "key 1"},
                )
                key = key if key.isascii() else "key 1"
                asks = [EntityLookup("user_topk", entity, k=3) for entity in entities]
                complaints, answers = shop.checker.judge_reply(tuple(asks), reply)
                if complaints and shop.knowledge.is_settled():
                    for rule, expected, observed in complaints:
                        stage.report.violate(rule, CANARY, expected, observed, shop.client.recent[-3:])
        ids = {answer["generation"] for answer in answers if answer["source"] != "previous"}
        if len(ids) == 1:
            (id_,) = ids
            first_generation_id = arms.setdefault(key, id_)
            stage.require(
                first_generation_id == id_,
                "canary sticky",
                "docs/reference/http-api.md: the same key always gets the same generation",
                first_generation_id,
                {"key": key, "way": key_source, "answer": answers[0]},
                shop.client.recent[-2:],
            )


def _ask_without_key(stage: Stage, shop: Shop, live: str) -> None:
    """A batch of several users without a key is answered by the live generation."""
    for first in range(0, 40, 4):
        users = [Input(user) for user in shop.world.users[first : first + 4]]
        answers = shop.checker.judge_lookups(shop.client, *(EntityLookup("user_topk", user, k=3) for user in users))
        stage.require(
            {answer["generation"] for answer in answers} == {live},
            "canary without key",
            "docs/reference/http-api.md: without a key the live generation answers",
            live,
            answers,
            shop.client.recent[-1:],
        )


def _send_feedback(stage: Stage, shop: Shop, arms: dict[str, str], trial: str) -> None:
    """Feedback names the arm that its generation, or its key, belongs to."""
    for key, id_ in list(arms.items())[:12]:
        arm = "canary" if id_ == trial else "live"
        for body in ({"generation": id_}, {"canary_key": key}):
            feedback: Json = {"event": "click", **body}
            reply = shop.client.send("POST", "/v1/feedback", feedback)
            stage.require(
                reply.status in (200, 202) and reply.body == {"arm": arm},
                "feedback",
                "docs/reference/http-api.md: The answer names what it was counted for",
                {"arm": arm},
                [reply.status, reply.body],
                shop.client.recent[-1:],
            )
    for feedback in ({"event": "click"}, {"event": "click", "generation": trial, "canary_key": "x"}):
        reply = shop.client.send("POST", "/v1/feedback", feedback)
        stage.require(
            reply.status == 422,
            "feedback",
            "docs/reference/http-api.md: exactly one of the three",
            422,
            [reply.status, reply.body],
            shop.client.recent[-1:],
        )


def run_experiment(stage: Stage) -> None:
    """Two bundles side by side: stable arms, events and blocks in both, shares that move, a stop."""
    rng = random.Random(f"experiment {stage.seed}")
    shape = Shape(users=120, items=80, with_vectors=rng.random() < 0.5)
    store = stage.folder / "store"
    control = Shop.make(
        stage.folder / "control", stage.servers, stage.report, stage.seed, shape, "control", artifacts=store
    )
    arm_shop = Shop.make(
        stage.folder / "other",
        stage.servers,
        stage.report,
        stage.seed,
        shape,
        "other",
        settings={"events": 'namespace = "control"'},
        artifacts=store,
        model_seed=stage.seed + 1,
    )
    arm_shop.knowledge = control.knowledge
    control.night()
    control.serve()
    try:
        control.send_events(control.draw_events(rng, 6))
        control.knowledge.allowed = {control.live}
        arm_generation = arm_shop.night("--until", "retire").id
        arm_shop.live = arm_generation
        arm_start = ("--arm", "control=control:0.5", "--arm", "b=other:0.5")
        control.site.run("experiment", "start", "ranker", "--share", "0.8", *arm_start)
        stage.report.count("experiments")
        control.knowledge.allowed = {control.live, arm_generation}
        generations = {"control": control.live, "b": arm_generation, None: control.live}
        _wait_for_arm(control, "ranker=b")
        control.checker.learn_order(control.client, arm_generation)
        arms: dict[str, str | None] = {}
        _ask_arms(stage, control, rng, arms, generations, 90)
        inside = sum(arm is not None for arm in arms.values()) / len(arms)
        stage.require(
            0.6 < inside < 0.95, "experiment share", EXPERIMENT + "each live for a share of the keys", 0.8, inside
        )
        control.send_events(control.draw_events(rng, 8))
        control.block(item=rng.choice(list(control.world.items)), user=rng.choice(control.world.users))
        _ask_arms(stage, control, rng, arms, generations, 60)
        _block_in_arm(stage, control, arm_shop, rng)
        for arm in ("control", "b"):
            for _ in range(8):
                lookup = replace(control.draw_ask(rng), generation=None, arm=f"ranker={arm}")
                _check_arm(stage, control, control.checker.judge_lookups(control.client, lookup), arm, generations)
        reply = control.client.lookup("user_topk", ["x"], arm="ranker=nobody")
        stage.require(
            (reply.status, reply.code) == (409, "arm_gone"),
            "arm gone",
            "docs/reference/http-api.md: An arm that is not held is 409 `arm_gone`",
            409,
            reply.body,
            control.client.recent[-1:],
        )
        control.site.run("experiment", "share", "ranker", "--share", "0.95")
        control.knowledge.change()
        wait_until(control.knowledge.is_settled, 5, "the change of shares has travelled", 0.1)
        _ask_arms(stage, control, rng, arms, generations, 60, grown=True)
        control.restart(signal.SIGTERM)
        _wait_for_arm(control, "ranker=b")
        _ask_arms(stage, control, rng, arms, generations, 40, grown=True)
        control.site.run("experiment", "stop", "ranker", "--reason", "audit")
        control.knowledge.allowed = {control.live}
        control.knowledge.change()
        for _ in range(30):
            lookup = replace(control.draw_ask(rng), generation=None)
            for answer in control.checker.judge_lookups(control.client, lookup):
                stage.require(
                    "arm" not in answer,
                    "experiment stopped",
                    EXPERIMENT + "`stop` takes effect within a second",
                    "no arm",
                    answer,
                    control.client.recent[-1:],
                )
    finally:
        control.close()


def _wait_for_arm(shop: Shop, arm: str) -> None:
    wait_until(
        lambda: shop.client.lookup("user_topk", ["x"], arm=arm, k=1).status == 200, 30, f"the arm {arm} is loaded", 0.1
    )
    shop.knowledge.change()
    wait_until(shop.knowledge.is_settled, 5, "the experiment has travelled", 0.1)
    shop.knowledge.answered.clear()


def _check_arm(
    stage: Stage, shop: Shop, answers: list[Json], arm: str | None, generations: dict[str | None, str]
) -> None:
    for answer in answers:
        right = answer.get("arm") == arm and answer.get("experiment") == ("ranker" if arm else None)
        if answer["source"] != "previous":
            right = right and answer["generation"] == generations[arm]
        stage.require(
            right,
            "arm",
            EXPERIMENT + "A request is answered from the generations of one namespace alone, and the answer says "
            "`experiment` and `arm`",
            {"arm": arm, "generation": generations[arm]},
            answer,
            shop.client.recent[-1:],
        )


def _ask_arms(
    stage: Stage,
    shop: Shop,
    rng: random.Random,
    arms: dict[str, str | None],
    generations: dict[str | None, str],
    count: int,
    grown: bool = False,
) -> None:
    for _ in range(count):
        user = rng.choice(shop.world.users)
        key = user
        lookup = replace(shop.draw_ask(rng), entity=Input(user), exclude=(), generation=None)
        if rng.random() < 0.5:
            key = f"key {rng.randrange(60)}"
            lookup = replace(lookup, canary_key=key)
        answers = shop.checker.judge_lookups(shop.client, lookup, route=rng.choice(["get", "lookup"]))
        if not answers or not shop.knowledge.is_settled():
            continue
        arm = answers[0].get("arm")
        _check_arm(stage, shop, answers, arm, generations)
        previous_arm = arms.setdefault(key, arm)
        if grown and previous_arm is None:
            arms[key] = previous_arm = arm
        stage.require(
            previous_arm == arm,
            "arm sticky",
            EXPERIMENT + "no key that was in it changes arms",
            previous_arm,
            {"key": key, "answer": answers[0]},
            shop.client.recent[-1:],
        )


def _block_in_arm(stage: Stage, control: Shop, arm_shop: Shop, rng: random.Random) -> None:
    """Only the arm leaves out what its own namespace blocks."""
    user = next(
        user for user in control.world.vectors or control.world.users if user not in control.knowledge.blocked_users
    )
    answer_before_block = control.client.lookup("user_topk", [user], arm="ranker=b", k=3).body["answers"][0]
    if not answer_before_block["items"]:
        return
    item = answer_before_block["items"][0]
    arm_shop.site.run("block", "--item", item)

    def is_gone() -> bool:
        answer = control.client.lookup("user_topk", [user], arm="ranker=b", k=3).body["answers"][0]
        return item not in answer["items"]

    try:
        wait_until(is_gone, 5, f"{item} is gone from arm b", 0.1)
    except AssertionError:
        stage.report.violate(
            "arm block",
            EXPERIMENT + "What an arm's own namespace blocks, only that arm leaves out",
            "gone within seconds",
            item,
            control.client.recent[-1:],
        )
    answers = control.checker.judge_lookups(
        control.client, EntityLookup("user_topk", Input(user), arm="ranker=control")
    )
    stage.report.count("lists of the control beside a block in the arm", len(answers))
    arm_shop.site.run("unblock", "--item", item)
    control.knowledge.change()
    wait_until(control.knowledge.is_settled, 5, "the unblocking has travelled", 0.1)
