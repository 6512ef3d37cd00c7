"""Other forms of models, tables and sources: int8, f2 and i1, near answers, vectors of items as a source."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.audit.checker import EntityLookup
from tests.audit.processes import Service, wait_until
from tests.audit.reference import TOPK, Input, Rules, dot, history_of
from tests.audit.scenarios.stage import Stage
from tests.audit.shop import FILTERS, Shape, Shop
from tests.audit.values import Json, Vector
from tests.audit.world import draw_looks

VECTORS = "docs/how-to/import/vectors.md: "
TABLES = "docs/reference/configuration.md: Precision of stored numbers: float16, float32 or, for vectors only, int8"
NEAR = "docs/how-to/reuse-near-answers.md: "


def run_forms(stage: Stage) -> None:
    """Each form over a small shop of its own."""
    _try_coarse_tables(stage)
    _try_long_histories(stage)
    _try_near(stage)
    _try_item_vectors(stage)


def _try_coarse_tables(stage: Stage) -> None:
    """Lists in f2 and vectors in i1: items in the exact order, numbers within their precision; live in int8."""
    shop = Shop.make(
        stage.folder / "coarse",
        stage.servers,
        stage.report,
        stage.seed,
        Shape(users=80, items=80),
        "form-coarse",
        settings={"precision": "f2", "vector_precision": "i1", "live_precision": "int8"},
    )
    shop.night()
    service = Service(shop.site).start()
    shop.services.append(service)
    try:
        for user in shop.world.users:
            if user in shop.generation.countries:
                _check_coarse(stage, shop, user)
        rng = random.Random(f"int8 {stage.seed}")
        for number in range(20):
            history = rng.sample(list(shop.world.items), 5)
            excluded = rng.sample(list(shop.world.items), 5)
            entity = Input(f"int8 {number}", tuple(history), rng.randrange(6)).body()
            answer = shop.client.lookup("user_topk", [entity], exclude=excluded, k=10).body["answers"][0]
            right = not set(history + excluded) & set(answer["items"])
            right = right and answer["scores"] == sorted(answer["scores"], reverse=True)
            stage.require(
                right and answer["source"] == "live" and len(answer["items"]) == 10,
                "live in int8",
                "docs/reference/http-api.md: Items in the sent history, in `exclude` ... never appear",
                "10 items of others, best first",
                answer,
                shop.client.recent[-1:],
            )
    finally:
        shop.close()


def _check_coarse(stage: Stage, shop: Shop, user: str) -> None:
    generation, client = shop.generation, shop.client
    history = history_of(generation.clicks.get(user, []))
    vector = generation.model.user_vector(history, generation.countries[user])
    ranked = generation.rank_by(vector, {i: v for i, v in generation.items.items() if i not in history})
    answer = client.lookup_one("user_topk", user).body
    exact = {item: score for score, item in ranked}
    scores = [exact.get(item) for item in answer["items"]]
    stage.require(
        scores == [score for score, _ in ranked[:TOPK]],
        "order in a table of f2",
        "docs/reference/http-api.md: Scores are compared before they are rounded to the table's precision",
        ranked[:TOPK],
        answer,
        client.recent[-1:],
    )
    near = all(
        score is not None and abs(score - served_score) <= abs(score) * 2**-10 + 2**-20
        for score, served_score in zip(scores, answer["scores"], strict=True)
    )
    stage.require(near, "numbers of f2", TABLES, scores, answer, client.recent[-1:])
    largest = max(abs(part) for part in vector)
    served_vector = client.lookup_one("user_vector", user).body["vector"]
    stage.require(
        all(abs(a - b) <= largest / 127 + 1e-6 for a, b in zip(vector, served_vector, strict=True)),
        "numbers of i1",
        TABLES,
        vector,
        served_vector,
        client.recent[-1:],
    )
    score_answer = client.send("POST", "/v1/score", {"user": user, "items": [item for _, item in ranked[:5]]}).body
    bound = score_answer["score_tolerance"] * largest if "score_tolerance" in score_answer else 0.0
    for item, score in zip(score_answer["items"], score_answer["scores"], strict=True):
        reach = sum(abs(part) for part in generation.items[item])
        stage.require(
            abs(score - exact[item]) <= bound * max(reach, 1.0) + 1e-5,
            "score tolerance",
            "docs/reference/http-api.md: Largest error of scores, relative to the largest vector component",
            exact[item],
            score_answer,
            client.recent[-1:],
        )
    stage.report.count("users of coarse tables")


def _try_long_histories(stage: Stage) -> None:
    """A model that takes 16 items, and nights that take 20: the newest count, by night, live and with events."""
    rng = random.Random(f"long {stage.seed}")
    rules = Rules(history_limit=20, filters=FILTERS, facets={"brands": "brand", "tagged": "tags"})
    shop = Shop.make(
        stage.folder / "long",
        stage.servers,
        stage.report,
        stage.seed,
        Shape(users=60, items=100, interactions_of_one=30, unknown_items=0),
        "form-long",
        rules=rules,
        max_length=16,
    )
    shop.night()
    shop.serve()
    try:
        for user in shop.world.users[:30]:
            shop.checker.judge_lookups(shop.client, EntityLookup("user_vector", Input(user)))
            shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input(user)))
        for number in range(15):
            history = tuple(rng.choice(list(shop.world.items)) for _ in range(rng.randrange(10, 50)))
            shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input(f"long {number}", history, 2), k=5))
        clicks: list[Json] = [
            {"user": rng.choice(shop.world.users), "item": rng.choice(list(shop.world.items)), "id": f"long {number}"}
            for number in range(30)
        ]
        shop.send_events(clicks)
        for event in clicks[:15]:
            shop.checker.judge_lookups(shop.client, EntityLookup("user_topk", Input(event["user"])))
        stage.report.count("users with long histories", 45)
    finally:
        shop.close()


def _floats(numbers: list[float]) -> list[float]:
    """Round numbers, or decimals of an answer, to float32."""
    return [float(np.float32(number)) for number in numbers]


def _try_near(stage: Stage) -> None:
    """Reuse of near answers: exclusions hold, scores are exact, and what has no mark is the live list."""
    rng = random.Random(f"near {stage.seed}")
    shop = Shop.make(
        stage.folder / "near",
        stage.servers,
        stage.report,
        stage.seed,
        Shape(users=60, items=120),
        "form-near",
        settings={"serving": "[serving.near.user_topk]\nerror = 0.1\noverlap = 0.5"},
    )
    shop.night()
    service = shop.serve()
    try:
        generation = shop.generation
        items = list(shop.world.items)
        base = [rng.sample(items, 12) for _ in range(4)]
        near = 0
        for number in range(400):
            history = [*rng.choice(base), *rng.sample(items, 1)]
            history = list(dict.fromkeys(history))
            excluded = rng.sample(items, 3)
            entity = Input(f"near {number}", tuple(history), 1)
            answer = service.client.lookup("user_topk", [entity.body()], k=10, exclude=excluded).body["answers"][0]
            vector = generation.model.user_vector([i for i in history if i in generation.items], 1)
            exact = all(
                abs(dot(vector, generation.items[item]) - score) < 1e-4
                for item, score in zip(answer["items"], answer["scores"], strict=True)
            )
            left_out = not set(answer["items"]) & {*history, *excluded}
            near += "near" in answer
            right = exact and left_out and answer["scores"] == sorted(answer["scores"], reverse=True)
            if "near" not in answer:
                ranked = generation.rank_by(
                    vector, {i: v for i, v in generation.items.items() if i not in {*history, *excluded}}
                )
                right = right and _floats(answer["scores"]) == _floats([score for score, _ in ranked[:10]])
            stage.require(
                right,
                "near",
                NEAR + "scores, order and exclusions stay exact; a list proven equal to the live one has no mark",
                "exact scores, nothing excluded",
                answer,
                service.client.recent[-1:],
            )
        stage.report.count("answers beside near ones", 400)
        stage.report.count("near answers", near)
        outcomes = sum(
            value
            for name, value in service.client.metrics().items()
            if name.startswith("larder_near_inputs_total{") and 'table="user_topk"' in name
        )
        stage.require(
            outcomes <= 400 and outcomes >= near,
            "near metrics",
            NEAR + "`larder_near_inputs_total{table,outcome}` counts inputs",
            f"{near} to 400",
            outcomes,
        )
    finally:
        shop.close()


@dataclass(frozen=True)
class Catalogue:
    """Vectors of items and users as sources, without a bundle."""

    items: dict[str, Vector]
    users: dict[str, Vector]


def _write_catalogue(shop: Shop, catalogue: Catalogue) -> None:
    for name, rows in (("item", catalogue.items), ("user", catalogue.users)):
        pq.write_table(
            pa.table(
                {
                    name: pa.array(list(rows), pa.string()),
                    "vector": pa.array(list(rows.values()), pa.list_(pa.float32())),
                }
            ),
            shop.folder / f"{name}-vectors.parquet",
        )


def _try_item_vectors(stage: Stage) -> None:
    """Vectors of items as a source: exact lists, a new item by an event, and in the next night's lists."""
    rng = random.Random(f"vectors {stage.seed}")
    shop = Shop.make(
        stage.folder / "vectors", stage.servers, stage.report, stage.seed, Shape(users=60, items=80), "form-vectors"
    )
    catalogue = Catalogue(
        {f"v/{number}": draw_looks(rng) for number in range(120)},
        {f"w {number}": draw_looks(rng) for number in range(80)},
    )
    _write_catalogue(shop, catalogue)
    text = (shop.folder / "larder.toml").read_text()
    gates = text[text.index("[gates]") : text.index("[serving]")]
    (shop.folder / "larder.toml").write_text(
        'namespace = "form-vectors"\nartifacts = "store"\nstate = "state"\nindex = "flat"\nsuperseded_grace_s = 0\n'
        '[sources]\nitem_vectors = "item-vectors.parquet"\nuser_vectors = "user-vectors.parquet"\n'
        '[events]\nenabled = true\n[tables.user_topk]\nkind = "user_topk"\nk = 20\nprecision = "f4"\n'
        '[tables.user_vector]\nkind = "user_vector"\nprecision = "f4"\n'
        + gates
        + '[serving]\nprecision = "fp32"\ndeadline_ms = 8000\n'
    )
    shop.site.run("night")
    service = Service(shop.site).start()
    shop.services.append(service)
    try:
        _check_catalogue(stage, service, catalogue)
        wrong = service.client.events([{"item": "short", "id": "n0", "vector": [1.0]}])
        stage.require(
            [rejection["reason"] for rejection in wrong.body["rejected"]] == ["unfit_item"],
            "new item by vector",
            "docs/how-to/send-events.md: `vector` with as many numbers, otherwise rejected as `unfit_item`",
            "unfit_item",
            wrong.body,
            service.client.recent[-1:],
        )
        vector = tuple(4.0 * part for part in catalogue.users["w 1"])
        event_reply = service.client.events([{"item": "brand new", "id": "n1", "vector": list(vector)}])
        stage.require(
            event_reply.status == 202 and event_reply.body["accepted"] == 1,
            "new item by vector",
            VECTORS,
            202,
            event_reply.body,
        )
        with_new = Catalogue(catalogue.items | {"brand new": vector}, catalogue.users)
        history = {"id": "someone", "history": ["v/1", "v/2"]}

        def is_known() -> bool:
            answer = service.client.lookup("user_topk", [history | {"id": f"s{rng.random()}"}]).body["answers"][0]
            return bool(answer["source"] == "live")

        wait_until(is_known, 5, "live answers", 0.1)
        _write_catalogue(shop, Catalogue(catalogue.items, catalogue.users))
        shop.site.run("night")

        def is_there() -> bool:
            return bool(service.client.lookup_one("user_topk", "w 1", k=1).body["items"] == ["brand new"])

        try:
            wait_until(is_there, 10, "the new item leads the list of w 1", 0.1)
        except AssertionError as error:
            stage.report.violate(
                "new item by vector",
                "docs/how-to/send-events.md: The next night takes a new item into the catalogue",
                "brand new first",
                str(error),
                service.client.recent[-2:],
            )
        _check_catalogue(stage, service, with_new)
        stage.report.count("nights of vectors of items", 2)
    finally:
        shop.close()


def _check_catalogue(stage: Stage, service: Service, catalogue: Catalogue) -> None:
    for user, vector in catalogue.users.items():
        answer = service.client.lookup_one("user_topk", user).body
        scores = sorted((dot(vector, item_vector) for item_vector in catalogue.items.values()), reverse=True)[:20]
        recomputed_scores = [dot(vector, catalogue.items[item]) for item in answer["items"]]
        stage.require(
            answer["scores"] == scores == recomputed_scores,
            "lists of vectors",
            VECTORS + "each gets the best of all items",
            scores,
            answer,
            service.client.recent[-1:],
        )
