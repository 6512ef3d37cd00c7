"""Features in the demo's world, and its towers: through a whole night, then asked for without any history."""

from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np

from infra.demo.checks import Judge, metric_contradictions
from infra.demo.dataset import INTERACTIONS_FILE, Dataset, make_synthetic_data
from infra.demo.evaluate import LIST_LENGTH, offline_lists
from infra.demo.features import NEW_ITEM, add_features, ask_cold_entities, label_means
from infra.demo.synthetic import Profiles, WorldSettings, make_profiles, synthesize
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig, Sources
from precompute.reference.train import train_reference
from serving.client import Client, Entity, Options
from tests.integration import nights
from tests.integration.fleet import fleet

WORLD = WorldSettings(user_count=400, item_count=200, seed=3, fashion_weight=0.3)


def test_the_same_clicks_have_the_same_features() -> None:
    clicks = synthesize(WORLD)

    profiles = make_profiles(clicks)

    assert profiles == make_profiles(clicks)
    assert list(profiles.users) == list(clicks.user_ids)
    assert list(profiles.items)[: len(clicks.item_ids)] == list(clicks.item_ids)
    assert len({features["country"] for features in profiles.users.values()}) > 1
    assert len(profiles.items) > len(clicks.item_ids)


def test_what_is_popular_changes_with_drift_and_who_clicked_what_does_not() -> None:
    still, drifting = (
        synthesize(WorldSettings(user_count=2_000, item_count=300, seed=1, fashion_weight=drift))
        for drift in (0.0, 0.6)
    )

    def pairs(of: object) -> set[tuple[int, int]]:
        return set(zip(of.user_rows.tolist(), of.item_rows.tolist(), strict=True))  # type: ignore[attr-defined]

    def moved(of: object) -> float:
        """Total variation between what was clicked in the first and in the last third."""
        rows, third = of.item_rows, len(of.item_rows) // 3  # type: ignore[attr-defined]
        first, last = (
            np.bincount(item_rows, minlength=300) / len(item_rows) for item_rows in (rows[:third], rows[-third:])
        )
        return float(np.abs(first - last).sum() / 2)

    assert pairs(still) == pairs(drifting)
    assert moved(drifting) > moved(still) + 0.1


def test_labels_have_the_mean_of_their_vectors_and_others_the_mean_of_all() -> None:
    vectors = np.array([[1.0, 0.0], [3.0, 2.0], [5.0, 1.0]], np.float32)

    labels, means = label_means(["b", "b", "a"], vectors)

    assert labels == ["a", "b"]
    assert means.tolist() == [[5.0, 1.0], [2.0, 1.0], [3.0, 1.0]]


def prepared(folder: Path, redis_url: str) -> tuple[NightConfig, Dataset, Profiles]:
    """A night's data and a bundle whose towers take features."""
    data = make_synthetic_data(WORLD)
    assert data.profiles is not None
    data.write(folder)
    config = nights.prepare(folder, redis_url)
    sources = Sources(
        (INTERACTIONS_FILE,), user_features="user_features.parquet", item_features="item_features.parquet"
    )
    config = replace(config, sources=sources)
    train_reference(config)
    add_features(config.path(config.bundle), data.histories, data.profiles)
    return config, data, data.profiles


def test_features_alone_are_answered_live_and_all_else_by_the_night(tmp_path: Path, redis_url: str) -> None:
    # given
    config, data, profiles = prepared(tmp_path / "night", redis_url)
    generation = nights.publish_night(config, data.first_cut.isoformat())
    judge = Judge(history_by_user=data.histories)

    # when
    with fleet(config, tmp_path / "logs", count=1) as (service,):
        lines = ask_cold_entities(service.url, profiles, data.histories, judge)
        metrics = httpx.get(f"{service.url}/metrics").text
        with Client(service.url) as larder:
            entity = Entity(NEW_ITEM["item"], features=NEW_ITEM)
            (new_item,) = larder.lookup_many("item_similar", [entity], Options(k=2))

    # then
    # A night may have a record for a user with features and no click: then the record answers, else the model does.
    quiet, *others = lines
    assert quiet.startswith("user_topk of ") and quiet.endswith((": live", ": l2"))
    assert others == [
        f"item_similar of {list(profiles.items)[-1]}: l2",
        "user_topk of new-user: live",
        "user_affinity of new-user: live",
        "item_similar of new-item: live",
    ]
    assert judge.violations == [] and metric_contradictions(metrics, judge.answers_by_source) == []
    assert set(judge.answers_by_generation) == {generation}
    # Items that are similar to an item that only its features describe have its category.
    assert NEW_ITEM["category"] in {profiles.items[item]["category"] for item in new_item.items or ()}


def test_who_has_a_history_is_answered_as_the_reference_bundle_would(tmp_path: Path, redis_url: str) -> None:
    # given
    config, data, profiles = prepared(tmp_path / "night", redis_url)
    users = list(data.histories)[:50]

    # when
    generation = nights.publish_night(config, data.first_cut.isoformat())

    # then
    offline = offline_lists(config.path(config.bundle), data.histories, users, profiles)
    served = nights.top_lists(config, generation, users)
    assert {user: list(served[user][:LIST_LENGTH]) for user in users} == offline
    bundle = Bundle.open(config.path(config.bundle))
    assert {feature.column for feature in bundle.user_tower.spec.features} == {"country"}
    assert {feature.column for feature in bundle.item_tower.spec.features} == {"item", "category"}
