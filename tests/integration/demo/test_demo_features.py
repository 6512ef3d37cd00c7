"""Features in the demo's world, and its towers: through a whole night, then asked for without any history."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from infra.demo.checks import Judge
from infra.demo.dataset import Dataset, synthetic
from infra.demo.evaluate import TOP, offline_lists
from infra.demo.features import add_features, ask_cold, fit_ridge
from infra.demo.http import scrape
from infra.demo.synthetic import Profiles, World, profiles_of, synthesize
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig, Sources
from precompute.reference.train import train_reference
from tests.integration import nights
from tests.integration.fleet import fleet

WORLD = World(users=400, items=200, seed=3, drift=0.3)


def test_the_same_clicks_have_the_same_features() -> None:
    clicks = synthesize(WORLD)

    first_profiles, two, other_seed_profiles = (profiles_of(clicks, seed) for seed in (1, 1, 2))

    assert first_profiles == two
    assert first_profiles.users != other_seed_profiles.users
    assert list(first_profiles.users) == list(clicks.user_ids)
    assert not set(first_profiles.unseen) & set(clicks.item_ids)
    assert all(float(item_features["price"]) > 0 for item_features in first_profiles.items.values())


def test_what_is_popular_changes_with_drift_and_who_clicked_what_does_not() -> None:
    still, drifting = (
        synthesize(World(users=2_000, items=300, seed=1, drift=drift)) for drift in (0.0, 0.6)
    )

    def pairs(of: object) -> set[tuple[int, int]]:
        return set(zip(of.user_rows.tolist(), of.item_rows.tolist(), strict=True))  # type: ignore[attr-defined]

    def moved(of: object) -> float:
        """Total variation between what was clicked in the first and in the last third."""
        rows, third = of.item_rows, len(of.item_rows) // 3  # type: ignore[attr-defined]
        first, last = (
            np.bincount(item_rows, minlength=300) / len(item_rows)
            for item_rows in (rows[:third], rows[-third:])
        )
        return float(np.abs(first - last).sum() / 2)

    assert pairs(still) == pairs(drifting)
    assert moved(drifting) > moved(still) + 0.1


def test_a_regression_finds_what_labels_and_numbers_say() -> None:
    # given: a vector that a label and the logarithm of a number decide
    rng = np.random.default_rng(0)
    labels, numbers = rng.choice(["a", "b"], 2_000).tolist(), np.exp(rng.normal(3, 1, 2_000))
    is_a = np.array([label == "a" for label in labels])
    vectors = np.stack([is_a * 2.0, np.where(is_a, 1, -1) * np.log(numbers)], axis=1)

    # when
    regression = fit_ridge(labels, numbers, vectors.astype(np.float32))

    # then
    scaled = (np.log(numbers) - regression.mean) / regression.deviation
    label_positions = np.where(is_a, 0, 1)
    predicted = (
        regression.base[label_positions] + regression.slope[label_positions] * scaled[:, None]
    )
    assert regression.labels == ("a", "b")
    assert np.abs(predicted - vectors).max() < 0.05


def prepared(folder: Path, redis_url: str) -> tuple[NightConfig, Dataset, Profiles]:
    """A night's data and a bundle whose towers take features."""
    data = synthetic(WORLD)
    assert data.profiles is not None
    data.write_first(folder)
    config = nights.prepare(folder, redis_url)
    tables = data.feature_tables
    sources = Sources(
        ("interactions/*.parquet",),
        user_features=tables["user_features"],
        item_features=tables["item_features"],
    )
    config = replace(config, sources=sources)
    train_reference(config)
    add_features(config.path(config.bundle), data.histories, data.profiles)
    return config, data, data.profiles


async def test_features_alone_are_answered_live_and_all_else_by_the_night(
    tmp_path: Path, redis_url: str
) -> None:
    # given
    config, data, profiles = prepared(tmp_path / "night", redis_url)
    generation = nights.publish_night(config, data.first_cut.isoformat())
    judge = Judge(histories=data.histories)

    # when
    with fleet(config, tmp_path / "logs", count=1) as (service,):
        cold_starts = ask_cold(service.url, profiles, data.histories, judge)
        counts = await scrape(service.url)

    # then
    # A night may have a record for who has features and no click: then it answers, else the model does.
    quiet = next(cold_start for cold_start in cold_starts if cold_start.entity_kind == "quiet user")
    assert (quiet.source, quiet.producer) in (("live", "live"), ("l2", "batch"))
    assert {cold_start[:4] for cold_start in cold_starts if cold_start is not quiet} == {
        ("known user", "user_topk", "l2", "batch"),
        ("known user", "user_affinity", "l2", "batch"),
        ("unseen item", "item_similar", "l2", "batch"),
        ("new item", "item_similar", "live", "live"),
        ("new user", "user_topk", "live", "live"),
        ("new user", "user_affinity", "live", "live"),
    }
    assert judge.violations == []
    assert counts.disagreements(judge.sources, judge.entities) == []
    assert set(judge.generations) == {generation}
    # What is like an item that features alone describe is of its category.
    new_item_answer = next(
        cold_start for cold_start in cold_starts if cold_start.entity_kind == "new item"
    ).answer
    assert str(profiles.new_item["category"]) in new_item_answer


def test_who_has_a_history_is_answered_as_the_reference_bundle_would(
    tmp_path: Path, redis_url: str
) -> None:
    # given
    config, data, profiles = prepared(tmp_path / "night", redis_url)
    users = list(data.histories)[:50]

    # when
    generation = nights.publish_night(config, data.first_cut.isoformat())

    # then
    offline = offline_lists(
        config.path(config.bundle), data.histories, users, lambda _count: None, profiles
    )
    served = nights.top_lists(config, generation, users)
    assert {user: list(served[user][:TOP]) for user in users} == offline
    bundle = Bundle.open(config.path(config.bundle))
    assert {feature.column for feature in bundle.user_tower.spec.features} == {"country", "age"}
    assert {feature.column for feature in bundle.item_tower.spec.features} == {
        "item",
        "category",
        "price",
    }
