"""Values of the answer fields `live` and `stale`. Pure.

Values of `reason` are the tiers' `MissReason` that `PUBLIC_MISS_REASONS` lists.
"""

from cache.tiers.reads import DescribedEnum, MissReason

PUBLIC_MISS_REASONS = tuple([reason for reason in MissReason if not reason.traits.is_internal])
"""Values of an answer's `reason`, also used in metrics and explanations."""


class LiveReason(DescribedEnum):
    """Values of an answer's `live`: why live inference did not answer, although there was something to compute from."""

    OVERLOADED = "overloaded", "Shed under overload"
    BUSY = "busy", "The model's queue is full"
    TIMEOUT = "timeout", "The deadline left too little time for the model"
    NO_MODEL = "no_model", "This replica has no working model"
    NO_USABLE_INPUT = (
        "no_usable_input",
        "The model cannot use what was sent: no item of the history is known, or features are missing",
    )
    FAILED = "failed", "The model raised an error, or its output is invalid"
    CORRUPT = "corrupt", "The computed record cannot be read"
    EXHAUSTED = "exhausted", "No item of the computed list is left"


class StaleReason(DescribedEnum):
    """Values of an answer's `stale`, separated by commas: why this replica may lag behind."""

    STARTING = "starting", "The pointer has not been read yet"
    REDIS_UNREACHABLE = "redis_unreachable", "Redis cannot be reached, so the pointer is unknown"
    POINTER_CORRUPT = "pointer_corrupt", "The pointer cannot be read"
    POINTER_VANISHED = ("pointer_vanished", "Redis has lost the pointer: `larder restore` sets it")
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
    BACKGROUND_FAILING = ("background_failing", "A background loop keeps failing; `larder_background_failing` names it")
