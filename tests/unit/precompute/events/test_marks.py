"""Marks of the entities that events set values for, and the files of events that a night is asked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from cache.errors import ConfigError
from cache.format.ids import fingerprints
from precompute.config.settings import NightConfig
from precompute.events.files import EventFiles, event_files
from precompute.partitions.marks import marked_mask, marks_file_path, write_marks


def test_marks_are_of_the_entities_that_were_written_and_of_no_others(tmp_path: Path) -> None:
    written = write_marks(tmp_path, "user", [b"u3", b"u1", b"u2"])

    assert written == marks_file_path("user") != marks_file_path("item")
    queried_fingerprints = fingerprints([b"u1", b"u9", b"u3"])
    assert marked_mask(tmp_path / written, queried_fingerprints).tolist() == [True, False, True]


def test_no_marks_are_a_file_without_any(tmp_path: Path) -> None:
    written = write_marks(tmp_path, "item", [])

    assert marked_mask(tmp_path / written, fingerprints([b"i1"])).tolist() == [False]


def test_a_night_without_events_reads_none_and_takes_no_position_of_theirs() -> None:
    config = NightConfig()

    assert not config.events.enabled and event_files(config) == EventFiles()
    with pytest.raises(ConfigError, match="enabled is false") as refused:
        event_files(config, "1-0")
    assert refused.value.details["field"] == "events"


def test_a_position_at_which_no_file_ends_is_refused(tmp_path: Path) -> None:
    config = replace(NightConfig(), artifacts=str(tmp_path))
    config = replace(config, events=replace(config.events, enabled=True))

    assert event_files(config).files == ()
    with pytest.raises(ConfigError, match=r"no file of .* ends at 7-0, they go up to 0-0") as refused:
        event_files(config, "7-0")
    assert refused.value.details["field"] == "events_until"
