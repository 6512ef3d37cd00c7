"""Words for unusual answers, each listed once: the fields `live` and `stale`. Pure.

Those of `reason` are the `MissReason` of the tiers that `PUBLIC_MISS_REASONS` lists.
"""

from cache.tiers.reads import DescribedEnum, MissReason

PUBLIC_MISS_REASONS = tuple([reason for reason in MissReason if not reason.traits.is_internal])
"""Words of an answer's `reason`, as metrics and explanations have them too."""


class LiveReason(DescribedEnum):
    """Words of an answer's `live`: why live inference did not answer, though there was something to compute from."""

    OVERLOADED = "overloaded", "Left out under overload"
    BUSY = "busy", "The queue of the model is full"
    TIMEOUT = "timeout", "The deadline left too little time for the model"
    NO_MODEL = "no_model", "This replica has no working model"
    NO_USABLE_INPUT = (
        "no_usable_input",
        "The model takes nothing of what was sent: no item of the history is known, or features are missing",
    )
    FAILED = "failed", "The model raised an error, or its output is no answer"
    CORRUPT = "corrupt", "The record that was computed cannot be read"
    EXHAUSTED = "exhausted", "Nothing of the list that was computed is left"


class StaleReason(DescribedEnum):
    """Words of an answer's `stale`, with commas between: why this replica may lag behind."""

    STARTING = "starting", "The pointer was not read yet"
    REDIS_UNREACHABLE = "redis_unreachable", "Redis does not tell the pointer"
    POINTER_CORRUPT = "pointer_corrupt", "The pointer cannot be read"
    POINTER_VANISHED = ("pointer_vanished", "The pointer is gone from Redis: `larder restore` sets it")
    POINTER_BACKWARDS = ("pointer_backwards", "The pointer names an older move than this replica follows")
    POINTER_CONFLICTING = "pointer_conflicting", "One move of the pointer names two generations"
    LOAD_FAILED = "load_failed", "The generation that the pointer names cannot be loaded here"
    BLOCKLIST_UNREADABLE = "blocklist_unreadable", "A newer blocklist may be in force elsewhere"
    BLOCKLIST_NOT_ENFORCED = (
        "blocklist_not_enforced",
        "A blocklist could not be put in force here: the replica is not ready until it is",
    )
    EVENTS_BEHIND = ("events_behind", "Events, or values that they set, were accepted that are not counted here yet")
    EVICTION_POLICY = "eviction_policy", "Redis may evict published pages"
    EXPERIMENTS_UNREADABLE = "experiments_unreadable", "Newer experiments may be in force elsewhere"
    BACKGROUND_FAILING = (
        "background_failing",
        "A background loop fails again and again; `larder_background_failing` names it",
    )
