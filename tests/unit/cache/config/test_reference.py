"""The reference page of the configuration says what the model says."""

from pathlib import Path

from cache.config import reference
from cache.config.night import NightConfig
from cache.config.section import fields_of, meanings_by_setting, nested_section_classes
from cache.config.serving import ServingConfig

PAGE = Path(__file__).parents[4] / "docs/reference/configuration.md"


def test_the_page_is_not_stale() -> None:
    remedy = "python -m cache.config.reference > docs/reference/configuration.md"

    assert PAGE.read_text() == reference.reference_page(), remedy


def test_every_setting_says_what_it_means() -> None:
    inner = nested_section_classes(NightConfig) | nested_section_classes(ServingConfig)
    unsaid = {
        (kind.__name__, name)
        for kind in (NightConfig, ServingConfig, *inner.values())
        for name in fields_of(kind)
        if not meanings_by_setting(kind).get(name) and name not in nested_section_classes(kind)
    }

    assert unsaid == set()
