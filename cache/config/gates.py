"""Thresholds of the gates, in `[gates]`."""

from pydantic import NonNegativeFloat, PositiveFloat

from cache.config.section import section


@section
class GateThresholds:
    """Thresholds that a generation must reach before it may be published; shares are 0 to 1."""

    unusable_rows: NonNegativeFloat = 0.001
    """Share left out of the worst source or table, at most; one row always may be, unless it is 0."""
    coverage_of_source: NonNegativeFloat = 0.95
    """Share of users with an answer, in the worst table."""
    coverage_of_live: NonNegativeFloat = 0.8
    """Number of users with an answer, as a share of the live generation's."""
    items_of_live: NonNegativeFloat = 0.8
    """Number of items, as a share of the live generation's, at least."""
    items_of_live_most: NonNegativeFloat = 1.5
    """Number of items, as a share of the live generation's, at most: one that grows so fast may be a wrong one."""
    short_lists: NonNegativeFloat = 0.05
    """Share of lists with fewer items than asked for though the catalogue has enough, at most."""
    empty_lists: NonNegativeFloat = 0.01
    """Share of lists without any item, at most."""
    index_recall: NonNegativeFloat = 0.9
    """Recall of the index in the worst stratum."""
    int8_overlap: NonNegativeFloat = 0.9
    """Overlap of lists and labels of int8 models with those of fp32."""
    int8_cosine: NonNegativeFloat = 0.98
    """Cosine of vectors of int8 models with those of fp32."""
    skew_overlap: NonNegativeFloat = 0.9
    """Overlap of lists of the live path with the records."""
    skew_cosine: NonNegativeFloat = 0.95
    """Cosine of vectors of the live path with the records."""
    exact: NonNegativeFloat = 0.995
    """Share of records of a sample that equal a recomputation in float64."""
    top_items: NonNegativeFloat = 0.8
    """Share of all slots that the top 1 % of items hold, at most."""
    single_item: NonNegativeFloat = 0.5
    """Share of all slots that one item holds, at most."""
    distinct_lists: NonNegativeFloat = 0.05
    """Share of lists that differ from each other, at least."""
    score_psi: NonNegativeFloat = 0.25
    """Shift of scores against the live generation (PSI), at most."""
    score_psi_retrained: NonNegativeFloat = 1.0
    """Shift of scores with a changed bundle, at most."""
    list_jaccard: NonNegativeFloat = 0.4
    """Similarity of lists to those of the live generation (Jaccard), at least."""
    list_jaccard_retrained: NonNegativeFloat = 0.2
    """Similarity of lists with a changed bundle, at least."""
    top_items_of_live: NonNegativeFloat = 1.5
    """Ratio of the top items' share to that of the live generation, at most."""
    distinct_lists_of_live: NonNegativeFloat = 0.7
    """Ratio of distinct lists to those of the live generation, at least."""
    stale_lists: NonNegativeFloat = 0.9
    """Share of unchanged lists among users with new interactions, at most."""
    heldout_of_live: NonNegativeFloat = 0.7
    """Ratio of recall of interactions newer than the cut to that of the live generation, at least."""
    heldout_recall: NonNegativeFloat = 0.0
    """Recall of interactions newer than the cut, at least."""
    redis_headroom: NonNegativeFloat = 0.95
    """Share of Redis' memory used, at most."""
    disk_headroom: NonNegativeFloat = 1.0
    """Free disk on the host of every live replica, in multiples of the bytes that readers map."""
    memory_headroom: NonNegativeFloat = 1.0
    """Free memory on the host of every live replica, in multiples of the bytes that readers map."""
    timeout_s: PositiveFloat = 600.0
    """Seconds of one gate, beyond what reading the generation's bytes once takes at the governor's `floor_mib_s`."""
    total_timeout_s: PositiveFloat = 1800.0
    """Seconds of all gates, beyond what reading the generation's bytes three times takes at that rate."""
