"""Random requests, each drawn from the run's seed and its own number, so that one alone can be reproduced."""

import random
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import orjson
import pyarrow as pa

from tests.contract.side_by_side.differences import ARROW
from tests.contract.side_by_side.draws import BAD_OPTIONS, TABLES, WIDTHS, Draw, quoted
from tests.contract.side_by_side.exchange import Request
from tests.contract.side_by_side.refusals import REFUSALS, WIRES
from tests.contract.side_by_side.world import ShopFacts
from tests.integration.feature_towers import DIMS

BATCH_MAX: Final = 1_000
_JSON: Final = ("Content-Type", "application/json")
_ARROW_SENT, _ARROW_WANTED = ("Content-Type", ARROW), ("Accept", ARROW)
_SIZES: Final = ((1, 4, 0.5), (2, 30, 0.44), (100, 200, 0.05), (BATCH_MAX, BATCH_MAX, 0.01))
"""Sizes of batches: from, to, and their share."""
PAGES: Final = ("/docs", "/dashboard")
READ_ONLY_TARGETS: Final = ("/v1/generations", "/readyz", "/healthz")


class Recipe(NamedTuple):
    """A way to draw one kind of request, and its share per thousand."""

    weight: int
    draw: Callable[[Draw, int], Request]


def request(seed: int, number: int, shop_facts: ShopFacts, headers: tuple[tuple[str, str], ...]) -> Request:
    """Return the request of this number in the run of this seed, with the headers that all requests have."""
    draw = Draw(random.Random(f"{seed}:{number}"), shop_facts)
    recipe = draw.rng.choices(RECIPES, [recipe.weight for recipe in RECIPES])[0]
    drawn = recipe.draw(draw, number)
    if drawn.wire or any(name == "Authorization" for name, _ in drawn.headers):
        return drawn.numbered(number)
    return drawn.numbered(number, headers)


def _get_lookup(draw: Draw, _number: int) -> Request:
    table = draw.table()
    options = draw.options(table)
    target = f"/v1/lookup/{table}/{quoted(draw, draw.entity(table))}{_query(options)}"
    return Request("lookup", "GET", target, draw.headers(), options=tuple(options))


def _batch(draw: Draw, _number: int) -> Request:
    table = draw.table()
    size, options = _size(draw), draw.body_options(table)
    # Large batches contain ids only, because the total of histories in a request is bounded.
    entities = [draw.entity_input(table) if size <= 30 else draw.entity(table) for _ in range(size)]
    body = {"entities": entities, **options}
    headers: tuple[tuple[str, str], ...] = (_JSON, *draw.headers())
    if draw.chance(0.15):
        headers = (*headers, _ARROW_WANTED)
    return Request("lookupBatch", "POST", f"/v1/lookup/{table}", headers, _json(draw, body), options=tuple(options))


def _arrow_batch(draw: Draw, _number: int) -> Request:
    table = draw.table()
    ids = [draw.entity(table) for _ in range(_size(draw))]
    options = draw.options(table) if draw.chance(0.4) else {}
    kind = pa.large_utf8() if draw.chance(0.1) else pa.utf8()
    id_table = pa.table({"id": pa.array(ids, kind)}).replace_schema_metadata(_texts(options) or None)
    headers: tuple[tuple[str, str], ...] = (_ARROW_SENT, *draw.headers())
    if draw.chance(0.8):
        headers = (*headers, _ARROW_WANTED)
    return Request("lookupBatch", "POST", f"/v1/lookup/{table}", headers, stream_of(id_table), options=tuple(options))


def _tables(draw: Draw, _number: int) -> Request:
    entities = []
    for _ in range(draw.rng.randrange(1, 12)):
        table = draw.table()
        entity = draw.entity_input(table)
        entities.append({"table": table, **(entity if isinstance(entity, dict) else {"id": entity})})
    options = draw.body_options("brands" if draw.chance(0.8) else "near_topk")
    body = _json(draw, {"entities": entities, **options})
    return Request("lookupTables", "POST", "/v1/lookup", (_JSON, *draw.headers()), body, options=tuple(options))


def _score(draw: Draw, _number: int) -> Request:
    options = draw.body_options("near_topk", is_score=True)
    user = draw.entity_input("user_vector")
    items = [draw.item() for _ in range(draw.rng.choice((1, 3, 10, 10, 40, 300)))]
    body = _json(draw, {"user": user, "items": items, **options})
    return Request("score", "POST", "/v1/score", (_JSON, *draw.headers()), body, options=tuple(options))


def _explain(draw: Draw, _number: int) -> Request:
    table = draw.table()
    options = draw.options(table)
    options.pop("arm", None)
    target = f"/v1/explain/{table}/{quoted(draw, draw.entity(table))}{_query(options)}"
    return Request("explain", "GET", target, options=tuple(options), settles=True)


def _explain_input(draw: Draw, _number: int) -> Request:
    table = draw.table()
    options = draw.body_options(table)
    options.pop("arm", None)
    body = _json(draw, {"entities": [draw.entity_input(table)], **options})
    return Request("explainInput", "POST", f"/v1/explain/{table}", (_JSON,), body, options=tuple(options), settles=True)


def _feedback(draw: Draw, _number: int) -> Request:
    rng = draw.rng
    of: dict[str, Any] = rng.choice((
        {"generation": rng.choice((*draw.facts.generations, "20200101T000000Z-000000000000"))},
        {"canary_key": f"key-{rng.randrange(60)}"},
        {"arm": rng.choice(("ranker=b", "ranker=control", "ranker=x"))},
    ))  # fmt: skip
    body = {"event": rng.choice(("click", "buy", "a_1")), **of}
    if draw.chance(0.4):
        body["count"] = rng.choice((1, 7, 1_000_000, None))
    return Request("sendFeedback", "POST", "/v1/feedback", (_JSON,), _json(draw, body))


def _events(draw: Draw, number: int) -> Request:
    """Clicks, and some rejected ones, by few users, so that most users still have the night's list."""
    rng = draw.rng
    clicking = (*draw.facts.users[4:34], *draw.facts.removed_users[:3], *(f"stranger-{at}" for at in range(20)))
    is_busy = draw.chance(0.1)
    events: list[Any] = []
    for at in range(140 if is_busy else rng.randrange(1, 6)):
        event: dict[str, Any] = {
            "id": f"e-{number}-{at}", "user": "busy" if is_busy else rng.choice(clicking), "item": draw.item(),
            "time": rng.choice((_time(rng), 1_769_000_000 + rng.randrange(900_000), 1_769_000_000.25)),
        }  # fmt: skip
        if draw.chance(0.3):
            event |= {"type": rng.choice(("click", "buy")), "weight": rng.choice((0, -1, 2, 0.5, None))}
        events.append(event)
    if draw.chance(0.3) and not is_busy:
        events.append({**rng.choice(events), "item": draw.item()})  # its id is there before
    if draw.chance(0.3):
        events.insert(rng.randrange(len(events) + 1), rng.choice(_bad_events(draw, number)))
    return Request("sendEvents", "POST", "/v1/events", (_JSON,), _json(draw, {"events": events}))


def _values(draw: Draw, number: int) -> Request:
    """Attributes of items and users, and new items, which count a moment later than clicks."""
    rng, events = draw.rng, list[dict[str, Any]]()
    for at in range(rng.randrange(1, 4)):
        event: dict[str, Any] = {"id": f"v-{number}-{at}"}
        drawn_fraction = rng.random()
        if drawn_fraction < 0.5:
            price: Any = rng.choice((round(rng.uniform(0, 100), 2), None))
            event |= {
                "item": rng.choice(draw.facts.items[10:50]),
                "attributes": {"price": price, "stock": rng.random() < 0.5, "tags": ["sale"]},
            }
        elif drawn_fraction < 0.7:
            event |= {"user": rng.choice(draw.facts.users[4:34]), "attributes": {"country": rng.randrange(5)}}
        else:
            looks_vector = [round(rng.gauss(0, 1.5), 4) for _ in range(DIMS)]
            event |= {
                "item": f"new-{rng.randrange(60)}", "features": {"looks": looks_vector, "brand": "acme"},
                "attributes": {"stock": rng.random() < 0.5, "price": round(rng.uniform(0, 100), 2)},
            }  # fmt: skip
        events.append(event)
    return Request("sendEvents", "POST", "/v1/events", (_JSON,), _json(draw, {"events": events}))


def _bad_events(draw: Draw, number: int) -> tuple[Any, ...]:
    valid_event = {"id": f"b-{number}", "user": draw.facts.users[9], "item": draw.facts.items[9], "time": 1_769_000_000}
    alone = {"id": f"b-{number}", "item": "new-99"}
    return (
        5, {}, {"id": "x"}, {**valid_event, "id": ""}, {**valid_event, "id": "a" * 129}, {**valid_event, "user": 1.5},
        {**valid_event, "time": "2100-01-01T00:00:00Z"}, {**valid_event, "time": "soon"}, {**valid_event, "time": -1},
        {**valid_event, "weight": "x"}, {**valid_event, "type": ""}, {**valid_event, "colour": 1},
        {**valid_event, "attributes": {"a": 1}},
        {**valid_event, "user": draw.facts.blocked_users[0]}, alone, {**alone, "features": {"brand": "acme"}},
        {**alone, "vector": [0.5] * DIMS}, {**alone, "features": {"looks": [1.0]}}, {**alone, "attributes": {}},
        {**alone, "attributes": {"a": {"b": 1}}}, {**alone, "attributes": {"a": "x" * 1_025}},
        {**alone, "attributes": {f"a{at}": "x" * 1_000 for at in range(5)}}, {**alone, "features": {"looks": True}},
    )  # fmt: skip


def _read_only(draw: Draw, _number: int) -> Request:
    target = draw.rng.choice(READ_ONLY_TARGETS)
    kind = {"/v1/generations": "getGenerations", "/readyz": "getReadiness", "/healthz": "getLiveness"}[target]
    return Request(kind, "GET", target, settles=True)


def _dashboard(_draw: Draw, _number: int) -> Request:
    return Request("getDashboard", "GET", "/dashboard/data", settles=True)


def _page(draw: Draw, _number: int) -> Request:
    return Request("page", "GET", draw.rng.choice((*PAGES, "/openapi.json")))


def _head(draw: Draw, _number: int) -> Request:
    table = draw.rng.choice(TABLES)
    lookup = f"/v1/lookup/{table}/{quoted(draw, draw.entity(table))}"
    target = draw.rng.choice((lookup, lookup, *READ_ONLY_TARGETS, "/v1/lookup/nothing/x", "/docs"))
    return Request("head", "HEAD", target)


def _refused(draw: Draw, _number: int) -> Request:
    return draw.rng.choice(REFUSALS)(draw)


def _bad_option(draw: Draw, _number: int) -> Request:
    """A request with one option that is refused, in a query, a body or the metadata of a stream."""
    name = draw.rng.choice(tuple(BAD_OPTIONS))
    value, table = draw.rng.choice(BAD_OPTIONS[name]), draw.rng.choice(tuple(WIDTHS))
    entity, form = draw.entity(table), draw.rng.randrange(4)
    if form == 0:
        target = f"/v1/lookup/{table}/{quoted(draw, entity)}{_query({name: value})}"
        return Request("lookup", "GET", target, options=(name,))
    if form == 1:
        id_table = pa.table({"id": [entity]}).replace_schema_metadata(_texts({name: value}))
        return Request(
            "lookupBatch", "POST", f"/v1/lookup/{table}", (_ARROW_SENT,), stream_of(id_table), options=(name,)
        )
    if form == 2:
        body = {"user": draw.facts.users[5], "items": list(draw.facts.items[:3]), name: value}
        return Request("score", "POST", "/v1/score", (_JSON,), orjson.dumps(body), options=(name,))
    body = {"entities": [entity], name: value}
    return Request("lookupBatch", "POST", f"/v1/lookup/{table}", (_JSON,), orjson.dumps(body), options=(name,))


def _wire(draw: Draw, _number: int) -> Request:
    return Request("wire", "GET", "", wire=draw.rng.choice(WIRES))


def _with_token(draw: Draw, number: int) -> Request:
    """A request with another token than the run's: one with fewer rights, or an unknown one."""
    recipe = draw.rng.choices(RECIPES[:8], [recipe.weight for recipe in RECIPES[:8]])[0]
    drawn = recipe.draw(draw, number)
    names = tuple(name for name in draw.facts.tokens if name != "all")
    token = draw.rng.choice((*(f"Bearer {draw.facts.tokens[name]}" for name in names), "Bearer x", "", "Basic eDp5"))
    return drawn.numbered(number, (("Authorization", token),))


RECIPES: Final[tuple[Recipe, ...]] = (
    Recipe(350, _get_lookup),
    Recipe(140, _batch),
    Recipe(70, _arrow_batch),
    Recipe(60, _tables),
    Recipe(90, _score),
    Recipe(20, _explain),
    Recipe(12, _explain_input),
    Recipe(25, _feedback),
    Recipe(12, _events),
    Recipe(4, _values),
    Recipe(15, _read_only),
    Recipe(2, _dashboard),
    Recipe(4, _page),
    Recipe(15, _head),
    Recipe(90, _refused),
    Recipe(60, _bad_option),
    Recipe(8, _wire),
    Recipe(25, _with_token),
)
"""All ways; those that `_with_token` sends in another name come first."""


def stream_of(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def _size(draw: Draw) -> int:
    size_min, size_max, _ = draw.rng.choices(_SIZES, [weight for _, _, weight in _SIZES])[0]
    return draw.rng.randint(size_min, size_max)


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as texts, as a query and a stream's metadata contain them."""
    return {
        name: value if isinstance(value, str) else orjson.dumps(value).decode()
        for name, value in options.items()
        if value is not None
    }


def _query(options: Mapping[str, Any]) -> str:
    return f"?{urlencode(_texts(options))}" if options else ""


def _json(draw: Draw, body: Any) -> bytes:
    if draw.chance(0.05):
        return orjson.dumps(body, option=orjson.OPT_INDENT_2)
    return orjson.dumps(body)


def _time(rng: random.Random) -> str:
    return f"2026-02-{rng.randrange(1, 28):02d}T{rng.randrange(24):02d}:00:00{rng.choice(('Z', '', '+02:00'))}"
