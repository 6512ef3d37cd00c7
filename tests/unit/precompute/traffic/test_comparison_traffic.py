"""Canaries under skewed traffic, simulated: the same generation twice is published, one that is worse is not."""

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.config.night import CanaryConfig
from cache.traffic.split import KeySplit
from precompute.traffic.arm_comparison import ArmComparison, CanaryArmTotals, decide
from serving.traffic.canary import ArmCounts

USERS, REQUESTS, SPLITS, PERCENT = 20_000, 200_000, 25, 5.0
REPLICAS = 2
FALLBACKS = 0.03
KEYS = [b"u-%06d" % number for number in range(USERS)]


def traffic(rng: np.random.Generator, skew: float) -> NDArray[np.int64]:
    """(user, replica) of every pair that met, in the order of users; requests follow Zipf's law."""
    weights = 1 / np.arange(1, USERS + 1) ** skew
    request_counts = rng.permutation(rng.multinomial(REQUESTS, weights / weights.sum()))
    met = np.stack([rng.binomial(request_counts, 0.5), np.zeros(USERS, np.int64)])
    met[1] = request_counts - met[0]
    return met


def tried(seed: int, skew: float, *, scale: float = 1.0, defaults: float = 0.0) -> str:
    """The verdict on a canary whose scores are `scale` times live's and of whose answers more fall to defaults."""
    rng = np.random.default_rng(seed)
    met, split = traffic(rng, skew), KeySplit.of(f"generation-{seed}", PERCENT)
    tops = rng.lognormal(-0.7, 0.5, USERS)
    falls = rng.random(USERS)
    arms = {name: [ArmCounts() for _ in range(REPLICAS)] for name in ("live", "canary")}
    for user, key in enumerate(KEYS):
        arm = "canary" if split.has_key(key) else "live"
        default_share, factor = (FALLBACKS + defaults, scale) if arm == "canary" else (FALLBACKS, 1.0)
        answer = (
            {"source": "default"} if falls[user] < default_share else {"source": "l2", "scores": [tops[user] * factor]}
        )
        for replica, counts in enumerate(arms[arm]):
            if times := int(met[replica, user]):
                counts.count_answers(key, [answer])
                counts.request_count += times - 1  # what is known by now changes no more than this
    totals = [
        CanaryArmTotals.of(replica_counts.to_json() for replica_counts in arms[name]) for name in ("live", "canary")
    ]
    comparison = ArmComparison.of(*totals)
    verdict, against = decide(comparison, CanaryConfig())
    print(seed, skew, verdict, against, comparison.keys, comparison.score_psi, comparison.chance)
    return verdict


@pytest.mark.parametrize("skew", [0.0, 1.0, 1.2])
def test_the_live_generation_itself_as_a_canary_is_always_published(skew: float) -> None:
    assert [tried(seed, skew) for seed in range(SPLITS)] == ["publish"] * SPLITS


@pytest.mark.parametrize("wrong", [{"scale": 1.3}, {"defaults": 0.2}], ids=str)
@pytest.mark.parametrize("skew", [1.0])
def test_a_canary_that_answers_differently_is_always_abandoned(skew: float, wrong: dict[str, float]) -> None:
    assert [tried(seed, skew, **wrong) for seed in range(SPLITS)] == ["abandon"] * SPLITS
