"""Re-rankings as docs/how-to/re-rank-answers.md defines them: their meaning, and random ones."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping

from tests.audit.filters import draw_filter, passes
from tests.audit.reference import Ranked
from tests.audit.values import Attribute, Json, Vector

TOLERANCE = 1e-5


def draw_rerank(rng: random.Random) -> Json:
    """Draw a boost, a diversification, or both."""
    drawn: Json = {}
    kind = rng.choice(["boost", "most", "mmr", "boost+most", "boost+mmr", "most+mmr"])
    if "boost" in kind:
        drawn["boost"] = [
            {"filter": draw_filter(rng, 1), "factor": rng.choice([0.25, 0.5, 2.0, 4.0])}
            for _ in range(rng.randrange(1, 3))
        ]
    if "m" in kind.replace("boost", ""):
        drawn["diversify"] = {}
        if "most" in kind:
            drawn["diversify"] |= {"attribute": rng.choice(["brand", "tags"]), "most": rng.randrange(1, 4)}
        if "mmr" in kind:
            drawn["diversify"]["mmr"] = rng.choice([0.25, 0.5, 0.8, 1.0])
    return drawn


def boost(candidates: Ranked, spec: Json, attributes: Mapping[str, Mapping[str, Attribute]]) -> Ranked:
    """Apply the boosts; candidates of equal worth keep their order."""
    boosted = []
    for score, item in candidates:
        for boost_rule in spec.get("boost", []):
            if passes(boost_rule["filter"], attributes.get(item, {})):
                score = score * boost_rule["factor"] if score >= 0 else score / boost_rule["factor"]
        boosted.append((score, item))
    return sorted(boosted, key=lambda pair: -pair[0])


def _values(attributes: Mapping[str, Attribute], name: str | None) -> list[str]:
    if name is None or name not in attributes:
        return []
    value = attributes[name]
    return value if isinstance(value, list) else [str(value)]


def complaint(
    candidates: Ranked,
    spec: Json,
    attributes: Mapping[str, Mapping[str, Attribute]],
    vectors: Mapping[str, Vector],
    k: int,
    items: list[str],
) -> str | None:
    """Return why `items` is not the first k of the candidates in the new order, or None if it is."""
    ranked = boost(candidates, spec, attributes)
    diversify = spec.get("diversify", {})
    mmr, per_value_max, name = (diversify.get("mmr", 1.0), diversify.get("most"), diversify.get("attribute"))
    scores = [score for score, _ in ranked]
    low, high = (min(scores), max(scores)) if scores else (0.0, 0.0)
    span = high - low or 1.0
    count_by_value: Counter[str] = Counter()
    chosen_items: list[str] = []
    for rank in range(k + 1):
        open_ = [
            (score, item)
            for score, item in ranked
            if item not in chosen_items
            and (
                per_value_max is None
                or all(count_by_value[value] < per_value_max for value in _values(attributes[item], name))
            )
        ]
        if rank == k or not open_:
            return None if len(items) == rank else f"{len(items)} items, {rank} expected"
        if rank == len(items):
            return f"{rank} items; {open_[0][1]!r} could follow"
        worths = []
        for score, item in open_:
            worth = mmr * (score - low) / span
            if mmr < 1 and chosen_items:
                worth -= (1 - mmr) * max(
                    (max(cosine(vectors[item], vectors[chosen_item]), 0.0) for chosen_item in chosen_items), default=0.0
                )
            worths.append(worth)
        best_worth = max(worths)
        ids = [item for _, item in open_]
        if items[rank] not in ids:
            return f"place {rank}: {items[rank]!r} is no candidate there"
        index = ids.index(items[rank])
        exact = mmr == 1.0
        if worths[index] < best_worth - (0 if exact else TOLERANCE):
            best_item = ids[worths.index(best_worth)]
            return f"place {rank}: {items[rank]!r} is worth {worths[index]:g}, {best_item!r} {best_worth:g}"
        if exact and worths.index(best_worth) != index:
            return f"place {rank}: {items[rank]!r} stands behind its equal {ids[worths.index(best_worth)]!r}"
        chosen_items.append(items[rank])
        count_by_value.update(_values(attributes[items[rank]], name))
    return None


def cosine(left_vector: Vector, right: Vector) -> float:
    """Cosine of two vectors; 0 where one is zero."""
    length = math.sqrt(sum(a * a for a in left_vector) * sum(b * b for b in right))
    return sum(a * b for a, b in zip(left_vector, right, strict=True)) / length if length else 0.0
