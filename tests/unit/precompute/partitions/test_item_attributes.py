"""Attributes of items: each Arrow type in its own kind, by ordinal; what cannot be kept is noted and lacks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import ConfigError, SourceError
from cache.filters.attributes import NUMBER_TOO_LARGE, TEXT_TOO_LONG, ItemAttributes
from cache.filters.expression import read_filter
from cache.filters.filtering import mask_of
from cache.format.manifest import Artefact, Attribute, Manifest
from cache.model.filter_mask import FilterMask
from precompute.config.settings import NightConfig, Sources, TableConfig
from precompute.filters.item_attributes import write_item_attributes
from precompute.partitions.catalogue import open_items, write_catalogue
from precompute.sources.unusable import NOT_FINITE_REASON, UnusableRows
from precompute.sources.vocabulary import Vocabulary, to_string_chunks

IDS = [f"i{number}" for number in range(6)]


def opened(folder: Path, column: Any, unusable: UnusableRows | None = None) -> tuple[ItemAttributes, dict[str, int]]:
    """The attribute `a` of six items, written and mapped; ordinals by id."""
    pq.write_table(pa.table({"item": IDS, "a": column}), folder / "items.parquet")
    sources = Sources(item_features="items.parquet", item_attributes=("a",))
    config = NightConfig(shards=1, sources=sources, base=str(folder))
    texts = to_string_chunks(pa.chunked_array([IDS]))
    vocabulary = cast("Vocabulary", Vocabulary.of(texts))
    bundle: Any = SimpleNamespace(vocabulary=vocabulary, models=[])
    items = open_items(folder, write_catalogue(config, bundle, folder))

    files = write_item_attributes(config, items, folder, unusable=unusable)

    attributes = {
        name: Attribute(kind, **{part: Artefact(path, 0, "") for part, path in paths.items()})
        for name, (kind, paths) in files.items()
    }
    manifest = cast("Manifest", SimpleNamespace(items=SimpleNamespace(count=items.count, attributes=attributes)))
    ordinals = {items.id_of(ordinal): ordinal for ordinal in range(items.count)}
    return ItemAttributes.open(folder, manifest), ordinals


def find_passing_ids(attributes_and_ordinals: tuple[ItemAttributes, dict[str, int]], filter_: Any) -> set[str]:
    attributes, ordinals = attributes_and_ordinals
    mask = FilterMask.of(mask_of(read_filter(filter_).root_expression, attributes))
    is_passing = mask.among(np.arange(len(ordinals)))
    return {id_ for id_, at in ordinals.items() if is_passing[at]}


TIMES = [0, 86_400, 2 * 86_400, None, 4 * 86_400, 5 * 86_400]
COLUMNS: list[tuple[Any, Any, set[str]]] = [
    (pa.array(["x", "y", None, "", "ü", "x"]), {"==": ["a", "x"]}, {"i0", "i5"}),
    (pa.array(["x", "y", None, "", "ü", "x"]), {"in": ["a", ["ü", ""]]}, {"i3", "i4"}),
    (pa.array(["x", "y", None, "", "ü", "x"]), {"exists": "a"}, {"i0", "i1", "i3", "i4", "i5"}),
    (pa.array(["x", "y", "x", "y", "x", "y"]).dictionary_encode(), {"==": ["a", "y"]}, {"i1", "i3", "i5"}),
    (pa.array([["x", "y"], [], None, ["y", None], ["z"], ["x", "x"]]), {"contains": ["a", "x"]}, {"i0", "i5"}),
    (pa.array([["x", "y"], [], None, ["y", None], ["z"], ["x", "x"]]), {"exists": "a"}, {"i0", "i3", "i4", "i5"}),
    (pa.array([1, 2, None, -4, 5, 2**53], pa.int64()), {">=": ["a", 2]}, {"i1", "i4", "i5"}),
    (pa.array([1, 2, None, 4, 5, 6], pa.uint8()), {"not": {"<": ["a", 5]}}, {"i2", "i4", "i5"}),
    (pa.array([0.5, 2, None, float("nan"), 5, 6]), {"exists": "a"}, {"i0", "i1", "i4", "i5"}),
    (pa.array([True, False, None, True, True, False]), {"==": ["a", False]}, {"i1", "i5"}),
    (pa.array(TIMES, pa.timestamp("s")), {">": ["a", "1970-01-02"]}, {"i2", "i4", "i5"}),
    (pa.array(TIMES, pa.timestamp("s", "Europe/Berlin")), {"<=": ["a", 86_400]}, {"i0", "i1"}),
    (pa.array([0, 1, 2, None, 4, 5], pa.date32()), {"==": ["a", "1970-01-03"]}, {"i2"}),
]  # fmt: skip


@pytest.mark.parametrize(("column", "filter_", "expected_ids"), COLUMNS)
def test_a_column_is_kept_in_its_kind(tmp_path: Path, column: Any, filter_: Any, expected_ids: set[str]) -> None:
    assert find_passing_ids(opened(tmp_path, column), filter_) == expected_ids


@pytest.mark.parametrize(
    ("column", "reason", "exists_filter"),
    [
        (pa.array(["x" * 257, "y", "y", "y", "y", "y"]), TEXT_TOO_LONG, {"exists": "a"}),
        (pa.array([2**53 + 1, 1, 1, 1, 1, 1], pa.int64()), NUMBER_TOO_LARGE, {"exists": "a"}),
        (pa.array([float("inf"), 1, 1, 1, 1, 1]), NOT_FINITE_REASON, {"exists": "a"}),
    ],
)
def test_a_value_that_cannot_be_kept_is_noted_and_lacks(
    tmp_path: Path, column: Any, reason: str, exists_filter: Any
) -> None:
    unusable = UnusableRows()

    attributes_and_ordinals = opened(tmp_path, column, unusable)

    assert find_passing_ids(attributes_and_ordinals, exists_filter) == set(IDS[1:])
    reason_report = unusable.to_json()["item_features.a"]["reasons"][reason]
    assert reason_report == {"rows": 1, "cases": [{"item": "i0"}]}


@pytest.mark.parametrize("column", [pa.array([[1.0]] * 6), pa.array([{"x": 1}] * 6), pa.array([b"x"] * 6)])  # fmt: skip
def test_a_type_that_no_attribute_has_is_refused(tmp_path: Path, column: Any) -> None:
    with pytest.raises(SourceError, match=r"column 'a' is .*; attributes must be texts, lists of texts"):
        opened(tmp_path, column)


def test_settings_that_filters_could_not_be_answered_by_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"columns of sources\.item_features, which is not set"):
        NightConfig(sources=Sources(item_attributes=("a",)))
    with pytest.raises(ConfigError, match="add a table of kind user_vector"):
        NightConfig(
            sources=Sources(item_features="i.parquet", item_attributes=("a",)), tables={"t": TableConfig("user_topk")}
        )
