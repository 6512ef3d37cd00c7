"""Attachment of filters to a replica: lists are filtered and re-ranked as requests ask."""

from concurrent.futures import ThreadPoolExecutor

from cache.filters.filtering import Filtering
from serving.filters.filtered_lookup import FILTER_THREADS, FilteredLookup, FilterEvaluator
from serving.generations.snapshot import Snapshot
from serving.process.resources import lower_thread_priority
from serving.replica.hooks import Replica
from serving.replica.namespace import HeldNamespace


def attach(replica: Replica) -> FilterEvaluator:
    """Open the attributes of each generation's items, and answer requests with a filter or a re-ranking."""
    mask_executor = ThreadPoolExecutor(
        FILTER_THREADS, "larder-filters", initializer=lower_thread_priority, initargs=(replica.config.live_nice,)
    )  # fmt: skip
    filters = FilterEvaluator(replica.inference_executor, replica.admission.admit_live, mask_executor=mask_executor)

    def shape_lists(namespace: HeldNamespace) -> None:
        ladder = namespace.components.ladder
        ladder.shaper = FilteredLookup(ladder, filters)
        namespace.openers.append(open_filtering)

    async def aclose() -> None:
        mask_executor.shutdown(wait=False, cancel_futures=True)

    shape_lists(replica.own_namespace)
    replica.hooks.namespace_hooks.append(shape_lists)
    replica.hooks.close_steps.append(aclose)
    return filters


def open_filtering(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with filters over its items, if the items have attributes."""
    filtering = Filtering.open(snapshot.generation_folder, snapshot.manifest, snapshot.items)
    return snapshot if filtering is None else snapshot.with_part(filtering)
