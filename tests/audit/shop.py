"""A shop under audit: its sources, nights, services and Redis servers, and the reference's knowledge of them."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.audit.bundle import Model, make_model, write_bundle
from tests.audit.checker import PROMISES, Checker, EntityLookup, Knowledge
from tests.audit.client import Client
from tests.audit.filters import draw_filter
from tests.audit.processes import RedisServer, Service, Site, wait_until
from tests.audit.reference import Event, Generation, Input, Rules, make_generation
from tests.audit.report import Report
from tests.audit.reranks import draw_rerank
from tests.audit.values import Json
from tests.audit.world import BRANDS, COUNTRIES, TAGS, World, draw_attributes, draw_looks, make_world
from tests.audit.world import Shape as Shape

FILTERS: Mapping[str, Json] = {"in_stock": {"==": ["stock", True]}, "cheap": {"<": ["price", 20]}}
RERANKS: Mapping[str, Json] = {
    "varied": {"diversify": {"attribute": "brand", "most": 2}},
    "fresh": {"boost": [{"filter": {"==": ["stock", True]}, "factor": 8.0}]},
}

_EVENTS_TEXT_MAX = 600
"""Characters that a recipe has of one request's events."""

SETTINGS = """
namespace = "{namespace}"
shards = 2
bundle = "{bundle}"
artifacts = "{artifacts}"
state = "state"
index = "flat"
superseded_grace_s = 0
history_limit = {history_limit}
{top}
[sources]
interactions = ["interactions/*.parquet"]
item_features = "items.parquet"
user_features = "users.parquet"
{vectors}
item_attributes = ["brand", "tags", "price", "stock", "since"]

[events]
enabled = true
{events}

[tables.user_topk]
kind = "user_topk"
k = {topk}
precision = "{precision}"
[tables.user_vector]
kind = "user_vector"
precision = "{vector_precision}"
[tables.item_vector]
kind = "item_vector"
precision = "{vector_precision}"
[tables.item_similar]
kind = "item_similar"
k = {similar}
precision = "f4"
metric = "inner_product"
[tables.mood]
kind = "value"
value = "mood"
precision = "f4"

[filters.in_stock]
filter = {{"==" = ["stock", true]}}
tables = ["user_topk"]
[filters.cheap]
filter = {{"<" = ["price", 20]}}

[facets.brands]
attribute = "brand"
k = {facet}
[facets.tagged]
attribute = "tags"
k = {facet}

[gates]
unusable_rows = 0.2
coverage_of_source = 0.3
coverage_of_live = 0.1
items_of_live = 0
items_of_live_most = 10
short_lists = 1
empty_lists = 1
index_recall = 0
int8_overlap = 0
int8_cosine = 0
skew_overlap = 0
skew_cosine = 0
top_items = 1
single_item = 1
distinct_lists = 0
score_psi = 1000
score_psi_retrained = 1000
list_jaccard = 0
list_jaccard_retrained = 0
top_items_of_live = 1000
distinct_lists_of_live = 0
stale_lists = 1
heldout_of_live = 0
disk_headroom = 0
memory_headroom = 0
redis_headroom = 1

[governor]
readers = "never"

[serving]
precision = "{live_precision}"
deadline_ms = 8000
l2_deadline_ms = 5000
queue_target_ms = 5000
drain_s = 3
{serving}
[serving.rerank.varied]
diversify = {{attribute = "brand", most = 2}}
[serving.rerank.fresh]
boost = [{{filter = {{"==" = ["stock", true]}}, factor = 8.0}}]
"""


@dataclass
class Servers:
    """The two Redis servers of an audit; shops share them under namespaces of their own."""

    pages: RedisServer
    events: RedisServer

    @classmethod
    def start(cls, folder: Path) -> Servers:
        """Start both servers."""
        return cls(RedisServer(folder / "pages").start(), RedisServer(folder / "events", durable=True).start())

    def stop(self) -> None:
        """End both servers."""
        self.pages.stop()
        self.events.stop()


@dataclass
class Shop:
    """One namespace: sources, nights, a service, and the knowledge that judges its answers."""

    folder: Path
    servers: Servers
    report: Report
    rng: random.Random
    world: World
    model: Model
    rules: Rules
    namespace: str
    settings: dict[str, str] = field(default_factory=dict)
    knowledge: Knowledge = field(default_factory=Knowledge)
    erased_users: set[str] = field(default_factory=set)
    services: list[Service] = field(default_factory=list)
    live: str = ""
    previous: str | None = None
    sent_events: int = 0
    strangers: int = 0
    new_items: list[str] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        folder: Path,
        servers: Servers,
        report: Report,
        seed: int,
        shape: Shape | None = None,
        namespace: str = "shop",
        settings: Mapping[str, str] | None = None,
        rules: Rules | None = None,
        artifacts: Path | None = None,
        model_seed: int | None = None,
        world: World | None = None,
        max_length: int = 64,
    ) -> Shop:
        """Draw a shop and write its folder."""
        shape = shape or Shape()
        world = world or make_world(seed, shape)
        model = make_model(seed if model_seed is None else model_seed, world.vocabulary, max_length)
        rules = rules or Rules(filters=FILTERS, facets={"brands": "brand", "tagged": "tags"})
        shop = cls(
            folder, servers, report, random.Random(f"shop {seed}"), world, model, rules, namespace, dict(settings or {})
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_bundle(model, folder / "bundle", f"{seed}")
        shop.settings.setdefault("artifacts", str(artifacts or folder / "store"))
        shop.write_settings()
        shop.knowledge.reranks.update(RERANKS)
        return shop

    @property
    def site(self) -> Site:
        """The folder and environment of the shop's commands."""
        return Site(self.folder, self.servers.pages.url, self.servers.events.url)

    @property
    def checker(self) -> Checker:
        """The checker of the shop's answers."""
        return Checker(self.knowledge, self.report)

    @property
    def service(self) -> Service:
        """The first service."""
        return self.services[0]

    @property
    def client(self) -> Client:
        """Client of the first service."""
        return self.services[0].client

    @property
    def generation(self) -> Generation:
        """The generation that is live."""
        return self.knowledge.generations[self.live]

    def write_settings(self) -> None:
        """Write `larder.toml`."""
        values = {
            "namespace": self.namespace,
            "bundle": "bundle",
            "history_limit": str(self.rules.history_limit),
            "top": "",
            "events": "",
            "serving": "",
            "vectors": 'user_vectors = "vectors.parquet"' if self.world.vectors else "",
            "topk": str(self.rules.topk),
            "similar": str(self.rules.similar),
            "facet": str(self.rules.facet),
            "precision": "f4",
            "vector_precision": "f4",
            "live_precision": "fp32",
        }
        (self.folder / "larder.toml").write_text(SETTINGS.format(**(values | self.settings)))

    # Nights and releases

    def night(self, *options: str) -> Generation:
        """Write the sources, run a night over them, and compute with the reference what it has to contain."""
        self.world.write(self.folder)
        report = self.site.run("night", "--json", *options).document()
        generation = make_generation(
            report["generation"],
            self.world,
            self.model,
            self.rules,
            self.knowledge.events,
            self.erased_users,
            self.knowledge.erased_items,
            self.knowledge.event_index_by_new_item,
        )
        self.report.count("nights")
        for step in report["steps"]:
            if step["step"] == "score" and " copied" in step["what"]:
                self.report.count("nights that copied")
        self.knowledge.generations[generation.id] = generation
        if "--until" not in options:
            self.follow(generation.id)
        return generation

    def follow(self, id_: str) -> None:
        """Note that another generation is live, and wait until every service answers from it."""
        self.previous, self.live = self.live or None, id_
        self.knowledge.allowed = {id_}
        self.knowledge.change(f"{id_} is live")
        for service in self.services:
            self.wait_live(service)
        if self.services:
            self.checker.learn_order(self.client, id_)

    def wait_live(self, service: Service) -> None:
        """Wait until a service says that it serves the live generation."""

        def is_live() -> bool:
            if not service.client.is_ready():
                return False
            reply = service.client.send("GET", "/v1/generations")
            return reply.status == 200 and reply.body["live"]["generation"] == self.live

        wait_until(is_live, 20, f"the service on port {service.port} serves {self.live}")

    def serve_early(self) -> None:
        """Start a service before there is a generation: it is ready when the first night has published one."""
        service = Service(self.site).start(ready=False)
        self.services.append(service)

    def serve(self, *options: str, environment: Mapping[str, str] | None = None) -> Service:
        """Start a service and learn the catalogue's order from it."""
        service = Service(self.site, options, dict(environment or {}))
        service.client.token = service.environment.get("LARDER_TOKEN")
        service.start()
        self.services.append(service)
        self.knowledge.answered.clear()
        self.knowledge.reasons.clear()
        self.knowledge.with_events.clear()
        if self.live and not self.generation.order:
            self.checker.learn_order(service.client, self.live)
        return service

    def restart(self, how: signal.Signals) -> None:
        """End the first service, by TERM or KILL, and start it anew on its port."""
        code = self.service.stop(how)
        if how == signal.SIGTERM:
            self.report.require(
                code == 0, "exit", "docs/reference/command-line.md: exit codes: 0 done", 0, code, ["SIGTERM"]
            )
        self.service.start()
        self.knowledge.change(f"restart by {how.name}")
        self.knowledge.answered.clear()
        self.knowledge.reasons.clear()
        self.knowledge.with_events.clear()
        self.report.count(f"restarts by {how.name}")

    def roll_back(self) -> None:
        """Make the previous generation live again."""
        if self.previous is None:
            return
        target = self.previous
        self.site.run("roll-back", "--reason", "audit", "--to", target)
        self.report.count("roll backs")
        self.follow(target)
        self.previous = None

    def block(self, item: str | None = None, user: str | None = None) -> None:
        """Block an item, a user, or both."""
        arguments = ["block"]
        if item is not None:
            arguments += ["--item", item]
            self.knowledge.blocked_items.add(item)
        if user is not None:
            arguments += ["--entity", user]
            self.knowledge.blocked_users.add(user)
        self.site.run(*arguments)
        self.knowledge.change(" ".join(arguments))
        self.report.count("blocks")

    def unblock(self, item: str | None = None, user: str | None = None) -> None:
        """Take an item or a user off the blocklist."""
        arguments = ["unblock"]
        if item is not None:
            arguments += ["--item", item]
            self.knowledge.blocked_items.discard(item)
            self.knowledge.unblocked_items.add(item)
        if user is not None:
            arguments += ["--entity", user]
            self.knowledge.blocked_users.discard(user)
        self.site.run(*arguments)
        self.knowledge.change(" ".join(arguments))
        self.report.count("unblocks")
        self.learn_again()

    def learn_again(self) -> None:
        """Read the catalogue's order anew, now that other items can be seen."""
        id_, knowledge = self.live, self.knowledge

        def sees_all() -> bool:
            reply = self.client.lookup("user_topk", [Input(None, (), 0).body()], k=1)
            self.checker.judge_reply((), reply)
            return knowledge.is_settled()

        wait_until(sees_all, 10, "changes have travelled", 0.1)
        self.checker.learn_order(self.client, id_)

    def erase(self, id_: str, as_item: bool = False) -> None:
        """Erase a user or an item: blocked at once, left out of every night from now on."""
        self.site.run("erase", id_, *(["--as", "item"] if as_item else []))
        if as_item:
            self.knowledge.erased_items.add(id_)
            self.knowledge.blocked_items.add(id_)
        else:
            self.erased_users.add(id_)
            self.knowledge.blocked_users.add(id_)
        self.knowledge.change(f"erase {id_}")
        self.report.count("erasures")

    # Events

    def send_events(self, events: list[Json], client: Client | None = None) -> Json:
        """Send events, judge the receipt, and log those that have to count."""
        client = client or self.client
        marker: Json = {"user": f"marker {self.sent_events}", "item": "no-such-item", "id": f"m{self.sent_events}"}
        reply = client.events([*events, marker])
        self.report.require(
            reply.status == 202,
            "events accepted",
            "docs/how-to/send-events.md: The answer is 202 once the events are stored",
            202,
            reply.body,
            client.recent[-3:],
        )
        if reply.status != 202:
            return {}
        receipt: Json = reply.body
        rejected = {rejection["index"]: rejection["reason"] for rejection in receipt["rejected"]}
        refused_users = self.erased_users | self.knowledge.blocked_users
        expected = {index: "erased" for index, event in enumerate(events) if event.get("user") in refused_users}
        self.report.require(
            rejected == expected,
            "events rejected",
            "docs/how-to/send-events.md: `reason` is `erased` (its user is blocked or was erased)",
            expected,
            receipt,
            client.recent[-3:],
        )
        self.report.require(
            receipt["accepted"] == len(events) + 1 - len(rejected),
            "events accepted",
            "docs/how-to/send-events.md: Each event is accepted or rejected by itself",
            len(events) + 1 - len(rejected),
            receipt,
            client.recent[-3:],
        )
        now_s = time.time()
        self.new_items += [str(event["item"]) for event in events if "features" in event]
        for index, event in enumerate(events):
            if index not in rejected:
                self.log_event(event, receipt["position"], now_s)
        self.log_event(marker, receipt["position"], now_s)
        self.sent_events += 1
        self.knowledge.change(f"events {json.dumps(events, ensure_ascii=False)[:_EVENTS_TEXT_MAX]}")
        self.report.count("events", len(events))
        return receipt

    def log_event(self, event: Json, position: str, now_s: float) -> None:
        """Log an event that was accepted."""
        if event.get("features") is not None and event.get("user") is None:
            self.knowledge.event_index_by_new_item[str(event["item"])] = len(self.knowledge.events)
        self.knowledge.events.append(
            Event(
                str(event["id"]),
                position,
                float(event.get("time", now_s)),
                event.get("user"),
                event.get("item"),
                event.get("weight", 1.0),
                event.get("attributes"),
                event.get("features"),
            )
        )

    def draw_events(self, rng: random.Random, count: int) -> list[Json]:
        """Draw events of known users, unknown users and items."""
        drawn: list[Json] = []
        for number in range(count):
            id_ = f"e{self.sent_events}-{number}-{rng.randrange(10**6)}"
            kind = rng.choices(["click", "stranger", "user value", "item value", "new item"], [60, 8, 10, 17, 5])[0]
            if kind in ("click", "stranger"):
                user = rng.choice(self.world.users) if kind == "click" else f"stranger {rng.randrange(4)}"
                event: Json = {"user": user, "item": self.draw_item(rng), "id": id_}
                if rng.random() < 0.4:
                    event["time"] = self.world.clock - rng.randrange(0, 4000) + rng.random()
                if rng.random() < 0.2:
                    event["weight"] = rng.choice([0, -1, 0.5, 2])
                drawn.append(event)
            elif kind == "user value":
                country = rng.randrange(COUNTRIES) if rng.random() < 0.85 else None
                drawn.append({"user": rng.choice(self.world.users), "id": id_, "attributes": {"country": country}})
            elif kind == "item value":
                drawn.append({"item": self.draw_item(rng), "id": id_, "attributes": self.draw_values(rng)})
            else:
                item = f"new {self.world.seed}/{self.sent_events}-{number}"
                attributes = draw_attributes(rng)
                drawn.append(
                    {
                        "item": item,
                        "id": id_,
                        "features": {"looks": list(draw_looks(rng)), "lift": 0.5},
                        "attributes": attributes,
                    }
                )
        return drawn

    def draw_item(self, rng: random.Random) -> str:
        """Draw an item of the catalogue, sometimes a new or an unknown one."""
        if rng.random() < 0.02:
            return "no-such-item"
        if self.new_items and rng.random() < 0.05:
            return rng.choice(self.new_items)
        return rng.choice(list(self.world.items))

    def draw_values(self, rng: random.Random) -> Json:
        """Draw values that an event sets for an item; null clears one, a wrong kind as well."""
        values: Json = {}
        for name in rng.sample(["brand", "tags", "price", "stock"], rng.randrange(1, 3)):
            if rng.random() < 0.15:
                values[name] = None
            else:
                values[name] = {
                    "brand": rng.choice(BRANDS),
                    "tags": rng.sample(TAGS, rng.randrange(0, 3)),
                    "price": rng.randrange(0, 200) / 4,
                    "stock": rng.random() < 0.5,
                }[name]
        return values

    # Questions

    def draw_input(self, rng: random.Random) -> Input:
        """Draw an entity: a known user, an unknown one with or without an input, or an input alone."""
        kind = rng.choices(
            ["known", "known and sent", "stranger", "nobody", "anonymous", "evented"], [55, 8, 15, 5, 7, 10]
        )[0]
        if kind == "evented" and self.knowledge.events:
            users = [event.user for event in self.knowledge.events[-40:] if event.user]
            return Input(rng.choice(users)) if users else Input(rng.choice(self.world.users))
        if kind in ("known", "evented"):
            return Input(rng.choice(self.world.users))
        if kind == "nobody":
            return Input(f"nobody {rng.randrange(5)}")
        history = tuple(dict.fromkeys(self.draw_item(rng) for _ in range(rng.randrange(0, 8))))
        country = rng.randrange(COUNTRIES) if rng.random() < 0.9 or not history else None
        if rng.random() < 0.2:
            history = (*history, "unheard of")
        if kind == "known and sent":
            return Input(rng.choice(self.world.users), history, country)
        if kind == "anonymous":
            return Input(None, history, country)
        self.strangers += 1
        return Input(f"someone {self.strangers}", history, country)

    def draw_ask(self, rng: random.Random, generations: list[str] | None = None) -> EntityLookup:
        """Draw a lookup of a user's list."""
        entity = self.draw_input(rng)
        lookup = EntityLookup("user_topk", entity, k=rng.choice([None, 1, 2, 3, 5, 10, self.rules.topk]))
        if rng.random() < 0.4:
            expression = rng.choice(["in_stock", "cheap"]) if rng.random() < 0.4 else draw_filter(rng)
            lookup = replace(lookup, filter=expression)
        if rng.random() < 0.25:
            count = rng.choice([1, 3, 8, 40])
            items = list(self.world.items)
            lookup = replace(lookup, exclude=tuple(rng.sample(items, min(count, len(items)))))
        if rng.random() < 0.25:
            lookup = replace(lookup, rerank=rng.choice(["varied", "fresh"]) if rng.random() < 0.3 else draw_rerank(rng))
        if rng.random() < 0.1:
            lookup = replace(lookup, stored_only=True)
        if rng.random() < 0.1 and generations:
            lookup = replace(lookup, generation=rng.choice(generations))
        return lookup

    def ask_once(self, rng: random.Random, generations: list[str] | None = None, client: Client | None = None) -> None:
        """Send one random request to a random route, and judge the answer."""
        client = client or self.client
        kind = rng.choices(
            [
                "list",
                "get",
                "batch",
                "vector",
                "mood",
                "item",
                "similar",
                "facet",
                "explain",
                "score",
                "tables",
                "fresh",
            ],
            [34, 8, 8, 6, 5, 4, 6, 6, 8, 7, 4, 4],
        )[0]
        checker = self.checker
        items = list(self.world.items)
        if kind == "list":
            checker.judge_lookups(client, self.draw_ask(rng, generations))
        elif kind == "get":
            lookup = replace(self.draw_ask(rng, generations), entity=Input(rng.choice(self.world.users)), exclude=())
            checker.judge_lookups(client, lookup, route="get")
        elif kind == "batch":
            lookup = self.draw_ask(rng, generations)
            checker.judge_lookups(
                client, *(replace(lookup, entity=self.draw_input(rng)) for _ in range(rng.randrange(2, 9)))
            )
        elif kind == "vector":
            checker.judge_lookups(client, EntityLookup("user_vector", self.draw_input(rng)))
        elif kind == "mood":
            checker.judge_lookups(client, EntityLookup("mood", self.draw_input(rng)))
        elif kind == "item":
            checker.judge_lookups(client, EntityLookup("item_vector", Input(rng.choice([*items, "unheard of"]))))
        elif kind == "similar":
            lookup = EntityLookup(
                "item_similar", Input(rng.choice([*items, "unheard of"])), k=rng.choice([None, 1, 5, 12])
            )
            if rng.random() < 0.4:
                lookup = replace(lookup, filter=draw_filter(rng))
            elif rng.random() < 0.4:
                lookup = replace(lookup, exclude=tuple(rng.sample(items, 3)))
            checker.judge_lookups(client, lookup)
        elif kind == "facet":
            table, value = rng.choice(
                [("brands", rng.choice(BRANDS[:-1])), ("tagged", rng.choice(TAGS)), ("brands", "?")]
            )
            lookup = EntityLookup(table, Input(value), k=rng.choice([None, 1, 3]))
            if rng.random() < 0.3:
                lookup = replace(lookup, exclude=tuple(rng.sample(items, 3)))
            checker.judge_lookups(client, lookup)
        elif kind == "explain":
            checker.explain_and_ask(client, self.draw_ask(rng, generations))
        elif kind == "score":
            candidates = rng.sample([*items, "unheard of", "x"], rng.randrange(1, 20))
            entity = self.draw_input(rng)
            if entity.id is not None:
                checker.score(client, entity, candidates, draw_filter(rng) if rng.random() < 0.3 else None)
        elif kind == "tables":
            user = rng.choice(self.world.users)
            checker.judge_lookups(
                client,
                EntityLookup("user_topk", Input(user)),
                EntityLookup("user_vector", Input(user)),
                EntityLookup("item_similar", Input(rng.choice(items))),
                EntityLookup("mood", Input(user)),
                route="tables",
            )
        else:
            user = rng.choice(self.world.users)
            drawn_input = self.draw_input(rng)
            checker.judge_lookups(
                client,
                EntityLookup("user_topk", Input(user, drawn_input.history, drawn_input.country), k=5, fresh=True),
            )

    def compare_metrics(self) -> None:
        """Compare the counts of `/metrics` with the answers received since the service started."""
        know = self.knowledge
        metrics = self.client.metrics()
        for label, expected in (
            ("larder_answers_total", {f'source="{s}",table="{t}"': n for (t, s), n in know.answered.items()}),
            ("larder_misses_total", {f'reason="{r}",table="{t}"': n for (t, r), n in know.reasons.items()}),
            ("larder_event_answers_total", {f'table="{t}"': n for t, n in know.with_events.items()}),
        ):
            metric_counts = {
                name[len(label) + 1 : -1]: int(value)
                for name, value in metrics.items()
                if name.startswith(label + "{") and value
            }
            self.report.require(
                metric_counts == {name: number for name, number in expected.items() if number},
                f"metrics {label}",
                PROMISES["metrics"],
                {name: n for name, n in sorted(expected.items()) if metric_counts.get(name, 0) != n},
                {name: n for name, n in sorted(metric_counts.items()) if expected.get(name, 0) != n},
                ["count the answers of all requests since the start of the service, then GET /metrics"],
            )

    def close(self) -> None:
        """End all services."""
        for service in self.services:
            service.stop(signal.SIGKILL)
        self.services.clear()
