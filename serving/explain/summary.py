"""An explanation in one sentence. Pure."""

from collections.abc import Mapping
from typing import Any

from cache.tiers.results import MissReason
from serving.answers.sources import FALLBACKS, Source

_OUTAGE_TEXTS = {
    MissReason.L2_DOWN: "Redis cannot be reached",
    MissReason.L2_TIMEOUT: "Redis does not answer in time",
    MissReason.BREAKER_OPEN: "Redis failed several times in a row and is left alone for a moment",
}
_REASONS = _OUTAGE_TEXTS | {
    MissReason.NOT_IN_GENERATION: "the night did not know it and no live answer is stored",
    MissReason.NEGATIVE: "the night did not know it and no live answer is stored",
    MissReason.EXPIRED: "its stored live answer is over",
    MissReason.INPUT_CHANGED: "what is stored was computed from another input",
    MissReason.PAGE_MISSING: "its page is not in Redis",
    MissReason.CORRUPT: "its record in Redis is damaged or of another entity",
    MissReason.ENTITY_BLOCKED: "it is on the blocklist",
    MissReason.NEWER_EVENTS: "the user has newer events, and no answer with them is stored",
    MissReason.EXHAUSTED: "nothing of its list is left to show",
}
_TIERS = {
    Source.L1: "this process would answer from its own memory (L1)",
    Source.L2: "Redis would answer (L2)",
    Source.LIVE: "live inference would answer",
    Source.PREVIOUS: "the previous generation would answer",
    Source.DEFAULT: "the default that holds for everybody would answer",
}


def sentence(explanation: Mapping[str, Any]) -> str:
    """Sentence on which rung would answer, why not a higher one, and what is wrong with what is stored, if anything."""
    answer = explanation["answer"]
    parts = [_TIERS[answer["tier"]]]
    if (reason := answer["reason"]) is not None:
        parts[0] += f", since {_REASONS.get(reason, reason)}"
    if answer["live"]:
        parts.append(f"live inference could not: {answer['live']}")
    elif answer["tier"] in FALLBACKS and not explanation["model"]["computed_from"]:
        parts.append("live inference needs a history or features")
    l2_reason = explanation["l2"].get("reason")
    if answer["tier"] == Source.L1 and l2_reason in _OUTAGE_TEXTS and reason is None:
        parts.append(_OUTAGE_TEXTS[l2_reason])
    if (explanation["page"] or {}).get("state") == "damaged":
        parts.append("its page in Redis is not the one that the night made: restore it")
    if (
        explanation["same_bytes"] is False
        and explanation["record"]
        and explanation["record"]["by"] == "batch"
    ):
        parts.append("L1 and Redis hold different records")
    difference = explanation["difference"]
    if difference is not None:
        parts.append(_compared(difference, explanation["model"]["computed_from"]))
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _compared(difference: Mapping[str, Any], computed_from: str) -> str:
    by = {
        "sent": "the model, from what was sent,",
        "own": "the model",
        "events": "the model, from the night's input and newer events,",
        "stored_vector": "the stored vector",
    }[computed_from]
    if difference["exact"]:
        return f"{by} says the same now"
    if "overlap" not in difference:
        return f"{by} differs by up to {difference.get('delta_max')} now"
    if difference["overlap"] == 1.0:
        return f"{by} has the same items in another order now"
    return f"{by} shares {difference['overlap']:.0%} of the items now"
