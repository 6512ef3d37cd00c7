"""Table of the vectors of users, and the metric that lists are ranked by."""

from cache.format.manifest import Table
from cache.model.ranking import Metric
from serving.generations.snapshot import Snapshot
from serving.requests.errors import Problem


def vector_table(snapshot: Snapshot) -> Table:
    """The user vectors whose products with the item vectors mean something; 404 when the generation has none."""
    dims = snapshot.manifest.items.dims
    for table in snapshot.manifest.tables.values():
        if table.kind == "vector" and table.entity == "user" and table.layout.width == dims:
            return table
    raise Problem(
        404, "unknown_table", "this generation has no user vectors to score with", field="table"
    )


def metric_of(snapshot: Snapshot, table: Table | None = None) -> Metric:
    """Metric that the night ranked a table of lists by, or without one its users' lists; else the inner product."""
    manifest = snapshot.manifest
    for candidate_table in [table] if table is not None else manifest.tables.values():
        name = candidate_table.producer.index
        is_ranked = table is not None or candidate_table.producer.kind == "topk"
        if is_ranked and name is not None and name in manifest.indexes:
            return manifest.indexes[name].metric
    return "inner_product"
