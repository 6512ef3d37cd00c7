"""Random parts of requests: ids, inputs, filters, options; valid ones and refused ones."""

import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from tests.contract.side_by_side.exchange import AS_OF
from tests.contract.side_by_side.world import BRANDS, FEATURE_TEXT_BYTES, TAGS, ShopFacts
from tests.integration.feature_towers import COUNTRIES, DIMS

WIDTHS: Final[Mapping[str, int]] = {"user_topk": 40, "near_topk": 10, "item_similar": 20, "brands": 15}
"""Tables of lists, and the length of their lists."""
TABLES: Final = (*WIDTHS, "user_vector", "item_vector", "user_mood")
OF_ITEMS: Final = frozenset({"item_similar", "item_vector"})
ODD_IDS: Final = (
    "a/b", "zoë", "用户 1", "a b", "..", ".", "%", "%25", "a?b", "a#b", "+", "\n", "\t", "\x00", "nan", "NULL", "42.0",
    "42", "-1", "💛", "a" * 256, "\u202e", '"', "\\", "'", "{}", "[]", "null", " ", "ı", "e\u0301",
)  # fmt: skip
BAD_IDS: Final[tuple[Any, ...]] = ("", "a" * 257, 1.5, True, [], {}, ["a"], "é" * 129)
BASES: Final = 4
"""Histories that near strangers have in common, all but one item."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Source of one request's parts, from its own random numbers."""

    rng: random.Random
    facts: ShopFacts

    def chance(self, probability: float) -> bool:
        """Return True in that share of the draws."""
        return self.rng.random() < probability

    def table(self) -> str:
        """Return the name of a table, more often one of lists for users."""
        return self.rng.choices(TABLES, (8, 3, 3, 2, 3, 2, 3))[0]

    def entity(self, table: str) -> Any:
        """Id of an entity of the table: known ones, unknown ones, odd ones."""
        rng = self.rng
        if self.chance(0.05):
            return rng.choice(ODD_IDS)
        if table == "brands":
            return rng.choice((*BRANDS, "nobody's"))
        if table in OF_ITEMS:
            return rng.choice(self.facts.items) if self.chance(0.9) else f"item-{rng.randrange(300)}"
        return self.user()

    def user(self) -> str:
        """Return the id of a user: known, gone, blocked, or unknown."""
        pool = self.rng.random()
        if pool < 0.7:
            return self.rng.choice(self.facts.users)
        if pool < 0.78:
            return self.rng.choice(self.facts.removed_users)
        if pool < 0.82:
            return self.rng.choice(self.facts.blocked_users)
        return f"stranger-{self.rng.randrange(400)}"

    def item(self) -> str:
        """Id of an item: known, new, blocked or unknown."""
        pool = self.rng.random()
        if pool < 0.9:
            return self.rng.choice(self.facts.items)
        if pool < 0.94:
            return f"new-{self.rng.randrange(60)}"
        return self.rng.choice((*self.facts.blocked_items, "item-nowhere"))

    def history(self, length_max: int = 30) -> list[Any]:
        """Items in an order, some of them unknown."""
        return [self.item() for _ in range(self.rng.randrange(1, length_max))]

    def near_history(self) -> list[str]:
        """Return one of a few histories with one item replaced."""
        base = random.Random(self.rng.randrange(BASES)).sample(self.facts.items, 40)
        base[self.rng.randrange(len(base))] = self.rng.choice(self.facts.items)
        return base

    def features(self, table: str) -> dict[str, Any]:
        """Return columns that the models take, sometimes others."""
        rng = self.rng
        if table in OF_ITEMS:
            return {"looks": [round(rng.gauss(0, 1), 3) for _ in range(DIMS)]}
        feature_values: dict[str, Any] = {"country": rng.randrange(COUNTRIES)}
        if table == "user_mood" or self.chance(0.3):
            feature_values["mood"] = [rng.choice((0, 1, 0.5, rng.random())), round(rng.random(), 3)]
        if self.chance(0.1):
            feature_values["other"] = rng.choice(("text", 7, 0.25, ["a", "b"], [1, 2.5]))
        if self.chance(0.03):
            del feature_values["country"]
        return feature_values

    def entity_input(self, table: str) -> Any:
        """Entity of a body: an id, or an object with an input."""
        if self.chance(0.55):
            return self.entity(table) if self.chance(0.97) else self.rng.randrange(100)
        entity_object: dict[str, Any] = {}
        if self.chance(0.7):
            entity_object["id"] = self.entity(table)
        if table == "near_topk":
            return {**entity_object, "history": self.near_history(), "features": {"country": 1}}
        if self.chance(0.75):
            entity_object["history"] = self.history()
        if self.chance(0.9) or not entity_object:
            entity_object["features"] = self.features(table) or {"country": 1}
        if self.chance(0.05):
            entity_object.setdefault("history", None)
        return (
            entity_object
            if entity_object.keys() & {"id", "history"} or entity_object.get("features")
            else {"id": "somebody"}
        )

    def filter(self) -> Any:
        """Filter that the items' attributes allow."""
        rng = self.rng
        leaf: Callable[[], Any] = lambda: rng.choice((  # noqa: E731
            {"==": ["brand", rng.choice(BRANDS)]},
            {"in": ["brand", rng.sample(BRANDS, 2)]},
            {"contains": ["tags", rng.choice(TAGS)]},
            {rng.choice(("<", "<=", ">", ">=")): ["price", round(rng.uniform(0, 100), 2)]},
            {"==": ["stock", rng.random() < 0.8]},
            {">": ["since", rng.choice((1_740_000_000, "2025-03-01T00:00:00Z", "2025-01-01"))]},
            {"exists": rng.choice(("brand", "price", "tags"))},
        ))  # fmt: skip
        parts = [leaf() for _ in range(rng.randrange(1, 4))]
        parts = [{"not": part} if rng.random() < 0.2 else part for part in parts]
        return parts[0] if len(parts) == 1 else {rng.choice(("and", "or")): parts}

    def reranking(self) -> Any:
        """Re-ranking of either kind, or of both."""
        rng, rerank_spec = self.rng, dict[str, Any]()
        if self.chance(0.6):
            factors = (0.25, 0.5, 1, 2.5, 4)
            rerank_spec["boost"] = [
                {"filter": self.filter(), "factor": rng.choice(factors)} for _ in range(rng.randrange(1, 3))
            ]
        if self.chance(0.6) or not rerank_spec:
            diversify: dict[str, Any] = {"mmr": rng.choice((0.2, 0.8, 1))}
            if self.chance(0.7):
                diversify |= {"attribute": rng.choice(("brand", "tags")), "most": rng.randrange(1, 4)}
            if self.chance(0.4) and "most" in diversify:
                del diversify["mmr"]
            rerank_spec["diversify"] = diversify
        return rerank_spec

    def options(self, table: str, *, is_score: bool = False) -> dict[str, Any]:
        """Options of a request, most often few."""
        rng = self.rng
        makers: dict[str, Callable[[], Any]] = {
            "k": lambda: rng.randrange(1, WIDTHS.get(table, 10) + 1),
            "fresh": lambda: rng.random() < 0.6,
            "max_age_seconds": lambda: rng.choice((0, 3_600, 1_000_000_000, 1e9)),
            "max_events": lambda: 0,
            "as_of": lambda: rng.choice((AS_OF, AS_OF, "2020-01-01T00:00:00Z", "2100-01-01T00:00:00+01:00", "0-0")),
            "generation": lambda: rng.choice(self.facts.generations),
            "deadline_ms": lambda: rng.choice((20_000, 30_000.5, 100_000)),
            "canary_key": lambda: f"key-{rng.randrange(60)}",
            "arm": lambda: rng.choice(("ranker=b", "ranker=control")),
            "filter": lambda: rng.choice(("in_stock", "in_stock", "cheap", self.filter(), self.filter())),
            "rerank": lambda: rng.choice(("varied", "fresh", self.reranking(), self.reranking())),
        }
        weights = {"k": 0.35, "filter": 0.12, "rerank": 0.1, "fresh": 0.1}
        request_options = {name: make() for name, make in makers.items() if rng.random() < weights.get(name, 0.04)}
        if table in ("brands", *TABLES[4:]) and not is_score and not self.chance(0.05):
            request_options.pop("filter", None)
            request_options.pop("rerank", None)
        return request_options

    def body_options(self, table: str, *, is_score: bool = False) -> dict[str, Any]:
        """Options of a body, which may also be null, and say what to leave out."""
        request_options = self.options(table, is_score=is_score)
        if not is_score and self.chance(0.15):
            request_options["exclude"] = self.history(60)
        if self.chance(0.03):
            request_options[self.rng.choice(("k", "filter", "arm", "generation", "as_of"))] = None
        return request_options

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers that are options, and others that change nothing."""
        rng, header_pairs = self.rng, list[tuple[str, str]]()
        if self.chance(0.05):
            header_pairs.append(("X-Deadline-Ms", rng.choice(("20000", "3e4", "25000.5"))))
        if self.chance(0.08):
            header_pairs.append(("X-Larder-Canary-Key", f"key-{rng.randrange(60)}"))
        if self.chance(0.05):
            header_pairs.append(("X-Larder-Arm", rng.choice(("ranker=b", "ranker=control"))))
        if self.chance(0.05):
            header_pairs.append(("X-Larder-Timing", "1"))
        if self.chance(0.05):
            header_pairs.append(("X-Request-Id", f"request-{rng.randrange(1_000)}"))
        if self.chance(0.05):
            header_pairs.append(("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"))
        return tuple(header_pairs)

    def draw_word(self) -> str:
        """Return a word that names nothing."""
        return "".join(self.rng.choices(string.ascii_lowercase, k=8))


def quoted(draw: Draw, text: str) -> str:
    """An id in a path: with its slashes as they are, or encoded."""
    return quote(text, safe="/" if draw.chance(0.5) else "")


BAD_OPTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "k": (0, -1, 1.5, "x", True, 10**6, 10**19, []),
    "fresh": ("yes", 2, []),
    "max_age_seconds": (-1, "x", True, []),
    "max_events": (1, True, "x", 0.5),
    "as_of": ("yesterday", 5, "2026-01-01T00:00:00", "", []),
    "generation": (5, "20200101T000000Z-000000000000", ""),
    "deadline_ms": (0, -1, "x", True),
    "canary_key": ("", "a" * 257, 1.5, []),
    "arm": ("x", "a=b=c", "=b", "nothing=b", "ranker=nothing", 5),
    "filter": (
        "nowhere", {"==": ["colour", 1]}, {"==": ["brand"]}, {"<": ["brand", 1]}, {}, {"xor": []}, 5, "",
        {"and": [{"==": ["stock", "x"]}]}, {"contains": ["price", 1]}, "{",
    ),
    "rerank": (
        "nothing", {"boost": []}, {"boost": [{"filter": "cheap", "factor": 2}]}, {"diversify": {"most": 0}}, 5, {},
        {"diversify": {"attribute": "colour", "most": 2}}, {"boost": [{"filter": {"exists": "brand"}, "factor": 99}]},
        {"boost": [{"filter": {"exists": "colour"}, "factor": 2}]}, "{",
    ),
    "exclude": (5, [""], [1.5], ["a"] * 301, "x"),
    "colour": ("blue",),
}  # fmt: skip
"""Options with values that are refused, in a body or a query."""

BAD_FEATURES: Final[tuple[Any, ...]] = (
    5, [], {"country": True}, {"country": None}, {"country": "x"}, {"country": [1, "x"]}, {"country": {"a": 1}},
    {"country": 1.5}, {"mood": [1]}, {"mood": [1, 2, 3]}, {"country": 99}, {"other": ["a", 1]},
    {"other": "x" * (FEATURE_TEXT_BYTES + 1)}, {"other": [2**60, 0.5]}, {f"f{number}": 1 for number in range(257)},
    {"other": [0.5] * 8_193}, {"looks": [0.5] * DIMS},
)  # fmt: skip
