"""Looks at what a night reads and where it writes: sources, bundle, artefact store."""

from typing import TYPE_CHECKING

from cache.process.extras import PRECOMPUTE, missing
from infra.cli.check.found import CheckResult

if TYPE_CHECKING:
    from cache.config.night import NightConfig

FILES_COMPARED = 1_000
"""Number of files whose columns a look compares; a night compares all."""


def look_at_sources(config: "NightConfig") -> CheckResult:
    """Look at the files of sources, and at their first rows."""
    if line := missing("a look at sources", "precompute", *PRECOMPUTE):
        return "not used", f"by the service; {line}"
    from precompute.sources.files import all_files, find_copy_remarks, source_file, source_files
    from precompute.sources.formats import INTERACTIONS, demand_same_columns
    from precompute.sources.plausibility import Shape, demand_least, remarks
    from precompute.sources.readers import feature_schema, read_interactions, row_count
    from precompute.sources.unusable import UnusableRows

    sources, base = config.sources, config.path(".")
    if not sources.names_users:
        return "to do", "[sources] interactions is not set: `larder init` looks for them"
    files = all_files(config)
    interactions = source_files(sources.interactions, base)[:FILES_COMPARED]
    demand_same_columns(interactions, sources)
    unusable = UnusableRows()
    read = read_interactions(sources, base, unusable=unusable)
    first = next(read, None)
    rows = 0 if first is None else len(first.times)
    left_out = unusable.left_out(INTERACTIONS)
    is_all = next(read, None) is None
    if sources.interactions and is_all and not unusable.to_json().get(INTERACTIONS):
        demand_least(0, 0)
    if sources.interactions and not rows:
        return "to do", f"no interaction in the first rows of {files[0]}: is every weight above 0?"
    for name, columns in (
        (sources.item_features, (sources.item_column,)),
        (sources.user_features, (sources.user_column,)),
        (sources.user_vectors, (sources.user_column, sources.vector_column)),
        (sources.item_vectors, (sources.item_column, sources.vector_column)),
    ):
        if name:
            feature_schema(source_file(name, base), columns)
            if not row_count(source_file(name, base)):
                return "to do", f"{name} has no rows: write them, or leave it out of [sources]"
    file_count_text = f"{len(files)} file{'s' * (len(files) > 1)}"
    if not sources.interactions:
        users = sources.user_vectors or sources.user_features
        return "ok", f"{file_count_text}, none of interactions: users are those of {users}"
    assert first is not None  # noqa: S101 - it has rows
    shape = Shape.of_batch(first)
    if is_all:
        demand_least(shape.users, shape.items)
    odd = "".join(f"; {remark}" for remark in [*remarks(shape), *find_copy_remarks(interactions)])
    summary = f"{file_count_text}; {rows:,} interactions" + ("" if is_all else " in the first rows")
    if left_out:
        reasons = unusable.to_json()[INTERACTIONS]["reasons"]
        reasons_text = ", ".join(
            f"{reason['rows']:,} {reason_name}" for reason_name, reason in reasons.items()
        )
        summary += f", {left_out:,} rows that cannot be used: {reasons_text}"
    return "ok", "; ".join([summary, *unusable.remarks(INTERACTIONS)]) + odd


def look_at_bundle(config: "NightConfig") -> CheckResult:
    """Look at the bundle: its checksums, whether its models open, and whether the sources have its features."""
    if line := missing("a look at bundles", "precompute", *PRECOMPUTE):
        return "not used", f"by the service; {line}"
    from precompute.bundles.bundle import Bundle
    from precompute.bundles.bundle_store import handed_over
    from precompute.scoring.inputs import demand_feature_types

    if config.sources.item_vectors:
        return "ok", f"made of {config.sources.item_vectors} by each night"
    folder = config.path(config.bundle)
    if folder.exists():
        bundle = Bundle.open(folder)
        demand_feature_types(config, bundle)
        return "ok", f"{folder}: {bundle.name} {bundle.version}"
    if handovers := handed_over(config.store()):
        return "ok", f"{handovers[-1].digest[:12]}, handed over to the store"
    return "to do", f"none at {folder}: set `bundle`, or run `larder train`"


def look_at_store(config: "NightConfig") -> CheckResult:
    """Look at the artefact store: whether it takes a name once only."""
    store = config.store()
    store.demand_write_once()
    count = len(store.names("generations"))
    return (
        "ok",
        f"{config.artifacts}: {count} generation{'s' * (count != 1)} in namespace {config.namespace}",
    )
