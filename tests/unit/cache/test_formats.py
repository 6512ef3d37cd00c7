"""Formats: one declaration, its page in the reference, the window, and what is said of a version outside it."""

import re
import tomllib

import pytest

from cache import formats
from cache.errors import CorruptArtefact, UnknownFormat
from cache.formats import (
    FORMATS,
    MANIFEST,
    POINTER,
    THIS_RELEASE,
    demand_readable,
    unreadable_reason,
    version_of,
    version_stamp,
)
from cache.store.releases import Pointer
from tests.unit.test_layering import ROOT

POINTED = Pointer("20260131T000000Z-0123456789ab", 7, None, "a", 1.0)


def test_the_release_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    latest_heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert latest_heading is not None
    assert project["version"] == THIS_RELEASE and THIS_RELEASE.partition(".dev")[0] == latest_heading[1]


def test_what_is_written_is_read() -> None:
    assert all(
        format_.oldest_readable_version <= format_.written_version <= format_.newest_readable_version
        for format_ in FORMATS.values()
    )


def test_the_reference_lists_every_format_with_its_versions() -> None:
    page = (ROOT / "docs/reference/formats.md").read_text()
    rows = re.findall(r"^\| ([\w ]+?) \| (\d+) \| ([\d to]+) \|", page, re.MULTILINE)

    assert rows == [
        (format_.name, str(format_.written_version), format_.readable_versions_text) for format_ in FORMATS.values()
    ]


def test_version_1_is_not_written_and_a_later_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert b"format" not in POINTED.to_bytes() and version_of({}) == 1

    raised = FORMATS[POINTER]._replace(written_version=2, newest_readable_version=2)
    monkeypatch.setitem(FORMATS, POINTER, raised)

    assert version_stamp(POINTER) == {"format": 2} and b'"format":2' in POINTED.to_bytes()
    assert Pointer.from_bytes(POINTED.to_bytes()) == POINTED


@pytest.mark.parametrize("version", [6, 0, "1", None, True, 1.0])
def test_a_version_that_is_not_read_is_refused(version: object) -> None:
    with pytest.raises(UnknownFormat):
        demand_readable(MANIFEST, version)


def test_the_line_names_format_versions_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    later = FORMATS[MANIFEST]._replace(written_version=3, oldest_readable_version=2, newest_readable_version=3)
    monkeypatch.setitem(FORMATS, MANIFEST, later)

    assert unreadable_reason(MANIFEST, 2) is None
    assert unreadable_reason(MANIFEST, 4, "the manifest of g") == (
        f"the manifest of g has manifest format 4, this release ({THIS_RELEASE}) reads 2 to 3; it was written by "
        "a newer release: "
        "upgrade this program first"
    )
    assert "run the preceding release first" in str(unreadable_reason(MANIFEST, 1))


def test_a_newer_pointer_is_no_damaged_one() -> None:
    raw = POINTED.to_bytes().replace(b"{", b'{"format":2,', 1)

    with pytest.raises(UnknownFormat, match="pointer format 2"):
        Pointer.from_bytes(raw)
    with pytest.raises(CorruptArtefact, match="not a pointer"):
        Pointer.from_bytes(raw.replace(b"format", b"shape"))


def test_heartbeats_tell_what_the_service_reads() -> None:
    assert set(formats.served_formats()) == {format_.name for format_ in FORMATS.values() if format_.is_read_by_service}
