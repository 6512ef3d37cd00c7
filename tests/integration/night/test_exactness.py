"""What is served is exact: compared with scores computed apart from all of Larder."""

from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from cache.model.runtime import ort
from precompute.config.settings import NightConfig
from tests.integration.nights import K, build_night, histories
from tests.integration.serving_app import serving

RELATIVE_GAP = 1e-5
SAMPLE = 1_000
SEED = 20_260_131


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, seed=SEED, users=1_200, items=400)


def exact_scores(bundle: Path, user_histories: list[list[str]]) -> tuple[list[str], NDArray[np.float64]]:
    """The bundle's item ids, and float64 scores [users, items] of its fp32 towers, own history at -inf."""
    model = orjson.loads((bundle / "bundle.json").read_bytes())
    ids: list[str] = pq.read_table(bundle / "items.parquet")["id"].to_pylist()
    number = {item: row for row, item in enumerate(ids)}

    def run(name: str, value: NDArray[np.int32]) -> NDArray[np.float64]:
        tower = model[name]
        session = ort.InferenceSession(str(bundle / tower["path"]))
        output = session.run([tower["output"]], {tower["inputs"][0]["name"]: value})[0]
        return np.asarray(output, np.float64)

    vectors = run("item_tower", np.arange(len(ids), dtype=np.int32))
    pad = model["user_tower"]["inputs"][0]["pad"]
    scores = np.empty((len(user_histories), len(ids)))
    for line, history in enumerate(user_histories):
        rows = [number[item] for item in history if item in number]
        # Compute one user at a time, without padding beyond one slot, to repeat nothing of how Larder batches.
        user = run("user_tower", np.array([[*rows, pad]], np.int32))
        scores[line] = (vectors @ user.T)[:, 0]
        scores[line, rows] = -np.inf
    return ids, scores


async def test_served_lists_equal_an_independent_exact_computation(night: NightConfig) -> None:
    # given
    history_by_user = histories(night)
    rng = np.random.default_rng(SEED)
    users = [str(user) for user in rng.choice(sorted(history_by_user), SAMPLE, replace=False)]
    ids, scores = exact_scores(night.path("bundle"), [history_by_user[user] for user in users])
    number = {item: row for row, item in enumerate(ids)}

    # when
    async with serving(night) as running:
        body = {"entities": [{"id": user} for user in users], "k": K}
        answers = (await running.post("/v1/lookup/user_topk", body))["answers"]

    # then: at every rank the score of the served item is the exact one of that rank
    assert [answer["id"] for answer in answers] == users
    for user, answer, line in zip(users, answers, scores, strict=True):
        assert answer["source"] in ("l1", "l2")
        best_scores = np.sort(line)[::-1][: min(K, int(np.isfinite(line).sum()))]
        served = line[[number[item] for item in answer["items"]]]
        assert len(set(answer["items"])) == len(answer["items"]) == len(best_scores), user
        assert not set(answer["items"]).intersection(history_by_user[user])
        assert (np.abs(served - best_scores) <= RELATIVE_GAP * np.maximum(np.abs(best_scores), 1e-12)).all(), user


async def test_the_comparison_would_notice_a_wrong_item(night: NightConfig) -> None:
    # given
    history_by_user = histories(night)
    user = min(history_by_user)
    ids, scores = exact_scores(night.path("bundle"), [history_by_user[user]])
    async with serving(night) as running:
        items = (await running.get(f"/v1/lookup/user_topk/{user}", k=K))["items"]

    # when: the first and the last item are swapped
    swapped = [items[-1], *items[1:-1], items[0]]

    # then
    best_scores = np.sort(scores[0])[::-1][: len(items)]
    served = scores[0][[ids.index(item) for item in swapped]]
    assert (np.abs(served - best_scores) > RELATIVE_GAP * np.abs(best_scores)).any()
