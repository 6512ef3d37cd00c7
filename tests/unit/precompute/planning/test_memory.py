"""The memory of a night's steps, foretold: no step grows with a shard, and what grows is named."""

from precompute.planning.sizes import step_bytes
from tests.unit.precompute.planning.test_sizes import shape

GIB = 1 << 30
TARGET = {
    "user_count": 100_000_000, "item_count": 10_000_000, "dims": 128, "interaction_count": 1_000_000_000,
    "bytes_by_model": {"user_tower": 5 * GIB, "item_tower": 5 * GIB}, "model_item_count": 10_000_000, "model_dims": 128,
}  # fmt: skip


def test_more_users_cost_only_the_directory_that_verify_reads():
    base_bytes_by_step, doubled_bytes_by_step = (
        step_bytes(shape(**{**TARGET, "shard_count": 8, "user_count": users, "interaction_count": 10 * users}))
        for users in (50_000_000, 100_000_000)
    )
    grown = {step for step in base_bytes_by_step if doubled_bytes_by_step[step] > 1.01 * base_bytes_by_step[step]}
    assert grown <= {"train", "verify"}
    assert doubled_bytes_by_step["verify"] - base_bytes_by_step["verify"] < 16 * 50_000_000


def test_features_of_any_width_are_bounded_in_scoring():
    narrow, wide = (
        step_bytes(shape(**{**TARGET, "shard_count": 8, "feature_bytes_per_user": feature_bytes}))
        for feature_bytes in (4 * 768, 4 * 4096)
    )
    assert wide["score"] == narrow["score"] and wide["begin"] == narrow["begin"]


def test_a_hundred_million_users_fit_a_host_of_64_gib_in_every_step_of_a_night():
    bytes_by_step = step_bytes(shape(**{**TARGET, "shard_count": 8}))
    assert max(size_bytes for step, size_bytes in bytes_by_step.items() if step != "train") < 64 * GIB, bytes_by_step
