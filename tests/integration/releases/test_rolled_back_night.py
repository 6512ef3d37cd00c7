"""A night that would hold what was rolled back is refused whatever its cut; a night of other rows is not."""

import uuid
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cache.control.states import GenerationState
from cache.errors import Refused
from cache.format.manifest import CUT_CHARS
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT
from precompute.config.settings import NightConfig
from precompute.releases.recovery import roll_back
from precompute.releases.release_log import open_releases
from precompute.releases.sweep import sweep
from precompute.steps import begin, verify
from precompute.steps.night import Night, run_night
from tests.integration.nights import DATA_UNTIL, NEXT, pin, prepare, publish, publish_night

REASON = "bad prices"
WHOLE_FILE = "2026-02-01T00:00:00Z"
LATER, AFTER_LATER = "2026-02-02T03:00:00Z", "2026-02-03T03:00:00Z"
WAYS = ("data_until", "run_after", "named")
"""Ways in which a night gets its time: by the option, from a scheduler, from the newest file."""


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    return replace(prepare(tmp_path / "n", redis_url, users=80, items=50), superseded_grace_s=0.0)


def run_whole_night(config: NightConfig, way: str, time_text: str) -> str:
    """Run a night whose time is the chosen cut, the scheduler's, or that of the newest file; return the generation."""
    data_until, run_after, named = (time_text if name == way else None for name in WAYS)
    night = Night(config, f"test-{uuid.uuid4().hex[:8]}", data_until, run_after, named)
    return str(run_night(night)[0][1].step_result["generation"])


def roll_back_newest(config: NightConfig) -> None:
    roll_back(config, target_generation=None, reason=REASON, attempt=f"test-{uuid.uuid4().hex[:8]}")


def begin_with_cut(config: NightConfig, cut: datetime | str) -> str:
    cut_text = cut if isinstance(cut, str) else cut.isoformat()
    return begin.run(config, data_until=cut_text, run_after=None)["generation"]


def state_of(config: NightConfig, generation: str) -> GenerationState | None:
    with open_releases(config) as releases:
        return releases.state(generation)


def click_times(config: NightConfig) -> list[datetime]:
    times: list[datetime] = pq.read_table(config.path("interactions.parquet")).column("timestamp").to_pylist()
    return sorted(times)


@pytest.mark.parametrize("way", WAYS)
def test_rolled_back_lists_do_not_return_by_a_later_night_over_the_same_files(config: NightConfig, way: str) -> None:
    # Given a generation of all rows that was rolled back
    first = publish_night(config, DATA_UNTIL)
    bad = run_whole_night(config, "named", WHOLE_FILE)
    roll_back_newest(config)

    # When a later night of the same files begins, however its time is given, then it is refused, again and again
    for _ in range(2):
        with pytest.raises(Refused) as refusal:
            run_whole_night(config, way, LATER)
        message = str(refusal.value)
        assert f"would hold the same as {bad}, which was rolled back: {REASON}" in message
        assert f"`larder verify {bad}`, then `larder publish {bad}`" in message
    assert config.store().names("generations") == [first, bad]

    # And the same night is refused in the same words
    with pytest.raises(Refused) as refusal:
        run_whole_night(config, "named", WHOLE_FILE)
    assert f"cannot begin {bad}: it was rolled back: {REASON}; the same files" in str(refusal.value)

    # And the way back in the message leads back, after which nights of the same files go on
    publish(config, bad, verify_again=True)
    assert state_of(config, bad) is GenerationState.LIVE
    later = run_whole_night(config, way, LATER)
    assert later[CUT_CHARS:] == bad[CUT_CHARS:] and state_of(config, later) is GenerationState.LIVE


def test_a_verification_alone_does_not_bring_rolled_back_lists_back(config: NightConfig) -> None:
    publish_night(config, DATA_UNTIL)
    bad = publish_night(config, WHOLE_FILE)
    roll_back_newest(config)
    verify.run(config, {"generation": bad})
    assert state_of(config, bad) is GenerationState.VERIFIED

    for cut in (WHOLE_FILE, LATER):
        with pytest.raises(Refused, match=f"{bad}.*rolled back: {REASON}"):
            begin_with_cut(config, cut)


def test_corrected_files_make_a_night(config: NightConfig) -> None:
    publish_night(config, DATA_UNTIL)
    bad = publish_night(config, WHOLE_FILE)
    roll_back_newest(config)
    clicks = pq.read_table(config.path("interactions.parquet"))
    pq.write_table(clicks.slice(0, len(clicks) - 3), config.path("interactions.parquet"))

    corrected = publish_night(config, LATER)

    assert corrected[CUT_CHARS:] != bad[CUT_CHARS:] and state_of(config, corrected) is GenerationState.LIVE


def test_the_rows_that_the_cuts_let_in_decide_and_not_the_cuts(config: NightConfig) -> None:
    # Given a rolled-back generation whose cut left out rows of the file
    publish_night(config, DATA_UNTIL)
    bad = publish_night(config, NEXT)
    roll_back_newest(config)
    pin(config, bad)
    times, cut = click_times(config), datetime.fromisoformat(NEXT)
    newest_read = max(time for time in times if time < cut)
    oldest_left_out = min(time for time in times if time >= cut)

    # Then each cut that lets in the very same rows is refused
    for same_cut in (newest_read + timedelta(microseconds=1), oldest_left_out):
        with pytest.raises(Refused, match=f"{bad}.*rolled back"):
            begin_with_cut(config, same_cut)

    # And a cut that leaves out one row more, or lets in one row more, begins a night without a remark
    for other_cut in (newest_read, oldest_left_out + timedelta(microseconds=1)):
        generation = begin_with_cut(config, other_cut)
        report = Build(config, config.store(), generation).need_report(BEGIN_REPORT)
        assert generation != bad and not any("rolled back" in remark for remark in report["remarks"])


def test_a_night_may_repeat_what_readers_have(config: NightConfig) -> None:
    """Two nights of the same rows: the roll back from the second to the first changed no list."""
    publish_night(config, WHOLE_FILE)
    publish_night(config, "2026-02-01T12:00:00Z")
    roll_back_newest(config)

    assert state_of(config, publish_night(config, LATER)) is GenerationState.LIVE


def test_what_was_removed_since_is_a_remark(config: NightConfig) -> None:
    publish_night(config, DATA_UNTIL)
    bad = publish_night(config, WHOLE_FILE)
    roll_back_newest(config)
    with open_releases(config) as releases:
        assert bad in sweep(config, releases, attempt="sweep").retired_generations

    generation = begin_with_cut(config, LATER)

    report = Build(config, config.store(), generation).need_report(BEGIN_REPORT)
    assert any(f"{bad}, which was rolled back ({REASON})" in remark for remark in report["remarks"])


def test_bad_files_that_come_back_after_a_good_night_are_refused_until_the_rolled_back_generation_is_removed(
    config: NightConfig,
) -> None:
    # Given a rolled-back generation that is still kept while a newer one of corrected files is live
    keeping = replace(config, superseded_grace_s=3600.0)
    publish_night(keeping, DATA_UNTIL)
    bad = publish_night(keeping, WHOLE_FILE)
    roll_back_newest(keeping)
    path = config.path("interactions.parquet")
    bad_clicks = path.read_bytes()
    clicks = pq.read_table(path)
    pq.write_table(clicks.slice(0, len(clicks) - 3), path)
    publish_night(keeping, LATER)

    # When the bad file returns, then the night is refused, with a way that leads on though the old one is too old
    path.write_bytes(bad_clicks)
    with pytest.raises(Refused, match=f"{bad}.*rolled back.*remove it with `larder retire`"):
        begin_with_cut(keeping, AFTER_LATER)
    with open_releases(config) as releases:
        sweep(config, releases, attempt="sweep")
    assert state_of(config, publish_night(config, AFTER_LATER)) is GenerationState.LIVE


def test_a_night_of_other_rows_ends_the_remark(config: NightConfig) -> None:
    publish_night(config, DATA_UNTIL)
    publish_night(config, NEXT)
    roll_back_newest(config)
    publish_night(config, WHOLE_FILE)  # compared, and removes what was rolled back

    generation = begin_with_cut(config, LATER)

    report = Build(config, config.store(), generation).need_report(BEGIN_REPORT)
    assert not any("rolled back" in remark for remark in report["remarks"])


def test_an_interrupted_night_is_not_continued_after_its_lists_were_rolled_back(config: NightConfig) -> None:
    publish_night(config, DATA_UNTIL)
    bad = publish_night(config, WHOLE_FILE)
    begun = begin_with_cut(config, LATER)
    assert begin_with_cut(config, LATER) == begun  # nothing is rolled back yet
    roll_back_newest(config)

    with pytest.raises(Refused, match=f"cannot begin {begun}: it would hold the same as {bad}"):
        begin_with_cut(config, LATER)
