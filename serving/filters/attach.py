"""Attachment of filters to a replica: lists are filtered and re-ranked as requests ask."""

from concurrent.futures import ThreadPoolExecutor

from cache.filters.filtering import Filtering
from serving.filters.filtered_lookup import FILTER_THREADS, FilteredLookup, Filters
from serving.generations.snapshot import Snapshot
from serving.process.resources import lower_thread_priority
from serving.replica.hooks import Replica
from serving.replica.namespace import HeldNamespace


def attach(replica: Replica) -> Filters:
    """Open the attributes of each generation's items, and answer requests with a filter or a re-ranking."""
    masking = ThreadPoolExecutor(
        FILTER_THREADS, "larder-filters", initializer=lower_thread_priority, initargs=(replica.config.live_nice,)
    )  # fmt: skip
    filters = Filters(replica.executor, replica.admission.admit_live, mask_executor=masking)

    def shape_lists(namespace: HeldNamespace) -> None:
        ladder = namespace.components.ladder
        ladder.shaper = FilteredLookup(ladder, filters)
        namespace.openers.append(open_filtering)

    async def aclose() -> None:
        masking.shutdown(wait=False, cancel_futures=True)

    shape_lists(replica.own)
    replica.hooks.namespaces.append(shape_lists)
    replica.hooks.close.append(aclose)
    return filters


def open_filtering(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with the filters over its items, if these have attributes."""
    filtering = Filtering.open(snapshot.root, snapshot.manifest, snapshot.items)
    return snapshot if filtering is None else snapshot.with_part(filtering)
