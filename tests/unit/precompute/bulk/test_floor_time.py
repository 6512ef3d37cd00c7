"""A load that a scheduler would end is foreseen, with value, limit and remedy."""

from cache.config.night import GovernorConfig, NightConfig
from cache.config.timetable import DagConfig
from precompute.bulk.headroom import time_limit_remark


def test_a_load_that_ends_in_time_is_no_remark() -> None:
    assert time_limit_remark(NightConfig(), 230e9) is None


def test_a_load_at_the_floor_beyond_its_limit_is_reported_with_the_remedies() -> None:
    remark = time_limit_remark(NightConfig(), 251e9)

    assert remark is not None
    assert "251.0 GB of pages take up to 14,961 s, at floor_mib_s (16 MiB/s)" in remark
    assert "load_timeout_s (14,400 s) and verify_timeout_s (14,400 s)" in remark
    assert remark.endswith(
        "raise load_timeout_s and verify_timeout_s in [dag], or floor_mib_s in [governor] beyond 16.6"
    )


def test_only_the_limit_that_is_too_short_is_named() -> None:
    config = NightConfig(dag=DagConfig(verify_timeout_s=100_000.0), governor=GovernorConfig(floor_mib_s=8.0))

    remark = time_limit_remark(config, 230e9)

    assert remark is not None and "verify_timeout_s" not in remark and "8 MiB/s" in remark
