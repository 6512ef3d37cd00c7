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
            drawn["diversify"] |= {
                "attribute": rng.choice(["brand", "tags"]),
                "most": rng.randrange(1, 4),
            }
        if "mmr" in kind:
            drawn["diversify"]["mmr"] = rng.choice([0.25, 0.5, 0.8, 1.0])
    return drawn


def boost(
    candidates: Ranked, spec: Json, attributes: Mapping[str, Mapping[str, Attribute]]
) -> Ranked:
    """Apply the boosts; candidates of equal worth keep their order."""
    boosted = []
    for score, item in candidates:
        for one in spec.get("boost", []):
            if passes(one["filter"], attributes.get(item, {})):
                score = score * one["factor"] if score >= 0 else score / one["factor"]
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
    mmr, most, name = diversify.get("mmr", 1.0), diversify.get("most"), diversify.get("attribute")
    scores = [score for score, _ in ranked]
    low, high = (min(scores), max(scores)) if scores else (0.0, 0.0)
    span = high - low or 1.0
    taken: Counter[str] = Counter()
    chosen: list[str] = []
    for place in range(k + 1):
        open_ = [
            (score, item)
            for score, item in ranked
            if item not in chosen
            and (
                most is None
                or all(taken[value] < most for value in _values(attributes[item], name))
            )
        ]
        if place == k or not open_:
            return None if len(items) == place else f"{len(items)} items, {place} expected"
        if place == len(items):
            return f"{place} items; {open_[0][1]!r} could follow"
        worths = []
        for score, item in open_:
            worth = mmr * (score - low) / span
            if mmr < 1 and chosen:
                worth -= (1 - mmr) * max(
                    (max(cosine(vectors[item], vectors[other]), 0.0) for other in chosen),
                    default=0.0,
                )
            worths.append(worth)
        best = max(worths)
        ids = [item for _, item in open_]
        if items[place] not in ids:
            return f"place {place}: {items[place]!r} is no candidate there"
        index = ids.index(items[place])
        exact = mmr == 1.0
        if worths[index] < best - (0 if exact else TOLERANCE):
            return f"place {place}: {items[place]!r} is worth {worths[index]:g}, {ids[worths.index(best)]!r} {best:g}"
        if exact and worths.index(best) != index:
            return f"place {place}: {items[place]!r} stands behind its equal {ids[worths.index(best)]!r}"
        chosen.append(items[place])
        taken.update(_values(attributes[items[place]], name))
    return None


def cosine(left: Vector, right: Vector) -> float:
    """Cosine of two vectors; 0 where one is zero."""
    length = math.sqrt(sum(a * a for a in left) * sum(b * b for b in right))
    return sum(a * b for a, b in zip(left, right, strict=True)) / length if length else 0.0
