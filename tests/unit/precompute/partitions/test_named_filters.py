"""Named filters of a night: what is none, or does not fit the attributes, is refused by name and place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.errors import ConfigError
from cache.filters.attributes import DTYPE_BY_KIND
from precompute.config.settings import FilterConfig, NightConfig, Sources, night_config
from precompute.filters.item_attributes import named_filters, passing_filters

PRICES = [5.0, 20.0, np.nan, 70.0]


def night(**filters: Any) -> NightConfig:
    sources = Sources(item_features="items.parquet", item_attributes=("price",))
    return NightConfig(
        sources=sources, filters={name: FilterConfig(filter_expression) for name, filter_expression in filters.items()}
    )


def find_passing_ordinals(folder: Path, config: NightConfig) -> dict[str, list[int]]:
    """Ordinals that pass, of four items with a price but one."""
    np.array(PRICES, DTYPE_BY_KIND["number"]).tofile(folder / "prices")
    files = {"price": ("number", {"values": "prices"})}
    mask_by_name = passing_filters(config, folder, files, len(PRICES))
    return {name: filter_mask.ordinals().tolist() for name, filter_mask in mask_by_name.items()}


def test_what_passes_is_found_by_name(tmp_path: Path) -> None:
    config = night(cheap={"<": ["price", 30]}, priced={"exists": "price"})

    assert find_passing_ordinals(tmp_path, config) == {"cheap": [0, 1], "priced": [0, 1, 3]}
    assert find_passing_ordinals(tmp_path, night()) == {}


@pytest.mark.parametrize(
    ("filter_", "message"),
    [
        ({"near": ["price", 1]}, r"\[filters.bad\]: there is no operator 'near'"),
        ({"and": [{"exists": "price"}, {"<": ["price"]}]}, r"\[filters.bad\] at and\[1\].<: < takes"),
        ({"==": ["colour", "red"]}, r"\[filters.bad\] at ==: items have no attribute 'colour'; they have price"),
        ({"contains": ["price", "x"]}, r"\[filters.bad\] at contains: price is of kind number"),
    ],
)  # fmt: skip
def test_a_bad_one_is_refused(tmp_path: Path, filter_: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_passing_ordinals(tmp_path, night(good={"exists": "price"}, bad=filter_))


def test_one_that_is_no_expression_is_refused_without_a_file_being_read() -> None:
    with pytest.raises(ConfigError, match=r"\[filters.bad\]"):
        named_filters(night(bad={}))


def test_they_are_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "larder.toml"
    path.write_text(
        '[sources]\nitem_features = "i"\nitem_attributes = ["price"]\n'
        '[filters.cheap]\nfilter = {and = [{"<" = ["price", 20]}, {exists = "price"}]}\n'
        'tables = ["user_topk", "item_similar"]\n[filters.other]\nfilter = {exists = "price"}\n'
    )

    config = night_config(str(path), {})
    cheap = config.filters["cheap"]

    assert config.table_and_filter_by_name == {
        "user_topk.cheap": ("user_topk", "cheap"),
        "item_similar.cheap": ("item_similar", "cheap"),
    }
    assert cheap.filter == {"and": [{"<": ["price", 20]}, {"exists": "price"}]}


@pytest.mark.parametrize(
    ("sources", "filters", "message"),
    [
        (Sources(), {"x": FilterConfig({"exists": "price"})}, "sources.item_attributes"),
        (None, {"a name": FilterConfig({"exists": "price"})}, "the name of a filter has 1 to 64"),
        (None, {"x": FilterConfig({"exists": "price"}, ("user_vector",))}, "lists are item_similar, user_topk"),
        (None, {"x": FilterConfig({"exists": "price"}, ("gone",))}, "names table 'gone'"),
        (None, {"x" * 60: FilterConfig({"exists": "price"}, ("user_topk",))}, "has 1 to 64"),
        (None, {"x": FilterConfig({"exists": "price"}, ("user_topk", "user_topk"))}, "the same name"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(sources: Any, filters: Any, message: str) -> None:
    sources = sources or Sources(item_features="i", item_attributes=("price",))
    with pytest.raises(ConfigError, match=message):
        NightConfig(sources=sources, filters=filters)


def test_they_are_part_of_what_decides_a_generation_where_there_are_any() -> None:
    assert b"filters" not in night().semantic_settings_bytes()
    assert (
        night(a={"<": ["price", 1]}).semantic_settings_bytes() != night(a={"<": ["price", 2]}).semantic_settings_bytes()
    )
