"""`larder`, from a folder of CSV files to answers, each command as a program of its own, on a real Redis."""

import csv
import json
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cache.process.redis_server import RedisServer, running_server
from infra.demo.synthetic import World, synthesize
from tests.integration.larder.commands import larder, running


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a shop's own files, under a shop's own names."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "exports").mkdir()
    clicks = synthesize(World(users=300, items=100, seed=1))
    with (folder / "exports" / "click log.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["device", "visitorId", "Article_ID", "occurred_at", "plays"])
        for user, item, moment in zip(
            clicks.user_rows, clicks.item_rows, clicks.times, strict=True
        ):
            names = clicks.user_ids[user], clicks.item_ids[item]
            lines.writerow(["phone", *names, int(moment) // 1_000_000, 1])
    return folder


def test_from_a_folder_to_answers(shop: Path, redis_server: RedisServer) -> None:
    redis = {"REDIS_URL": redis_server.url, "LARDER_NAMESPACE": f"test-{uuid.uuid4().hex[:12]}"}

    told = larder(shop, "init", "exports")
    assert "user = visitorId, item = Article_ID, timestamp = occurred_at, weight = plays" in told
    before = json.loads(larder(shop, "check", "--json", code=3, environ=redis))
    assert {each["what"] for each in before if each["state"] == "to do"} == {"bundle"}

    told = larder(shop, "train", "--quiet")
    assert " stood among 20 suggestions: the best of " in told
    larder(shop, "check", environ=redis)
    assert " gates passed" in larder(shop, "night", environ=redis)
    status = json.loads(larder(shop, "status", "--json", environ=redis))
    (generation,) = [each["generation"] for each in status["generations"]]

    with running(shop, "serve", "--port", "0", until="Larder serves on ", environ=redis) as url:
        answer = json.loads(
            larder(shop, "lookup", "user_topk", "u-00001", "--k", "5", "--url", url, "--json")
        )
        assert (answer["source"], answer["generation"]) == ("l2", generation)
        assert len(answer["items"]) == 5

        shown = larder(shop, "lookup", "user_topk", "u-00001", "--k", "5", "--url", url)
        assert shown.splitlines()[0].startswith("user_topk u-00001: 5 items from l1, ")
        assert [line.split()[1] for line in shown.splitlines()[1:]] == answer["items"]

        history = ",".join(answer["items"][:2])
        live = larder(shop, "lookup", "user_topk", "new", "--history", history, "--url", url)
        assert "from live, reason not_in_generation" in live.splitlines()[0]

        for table, kind in (("user_vector", "numbers"), ("user_affinity", "numbers")):
            assert f" {kind} from l2" in larder(shop, "lookup", table, "u-00001", "--url", url)
        why = json.loads(larder(shop, "explain", "user_topk", "u-00001", "--url", url, "--json"))
        assert why["answer"]["tier"] == "l1"

        refused = larder(shop, "lookup", "nothing", "u-00001", "--url", url, code=1)
        assert "there is no table 'nothing'; there are item_similar," in refused
        assert refused.startswith("larder: ") and refused.count("\n") == 1

        # What programs read is JSON alone, of all commands.
        now = datetime.now(UTC).isoformat(timespec="seconds")
        again = json.loads(larder(shop, "night", "--json", "--data-until", now, environ=redis))
        assert [each["step"] for each in again["steps"]][:2] == ["begin", "embed_items"]
        generation = again["generation"]
        erased = json.loads(larder(shop, "erase", "--list", "--json", environ=redis))
        assert erased == {"erasures": [], "overlays_dropped": None, "notes": []}
        top = json.loads(larder(shop, "top", "--url", url, "--json", environ=redis))
        assert top["verdict"]

        seen = json.loads(larder(shop, "status", "--json", environ=redis))
        assert (seen["live"], len(seen["replicas"])) == (generation, 1)


def test_without_a_redis_one_is_started_for_all(shop: Path, tmp_path: Path) -> None:
    settings = {
        "LARDER_STATE": str(tmp_path / "state"),
        "LARDER_ARTIFACTS": str(tmp_path / "store"),
    }
    larder(shop, "init", "exports", "--force")
    larder(shop, "train", "--quiet", environ=settings)

    with running(shop, "redis", until="Redis runs at ", environ=settings) as place:
        found = running_server(tmp_path / "state")
        assert found is not None and found.url.endswith(f"{place}/0")
        again = larder(shop, "redis", code=2, environ=settings)
        assert again.startswith("larder: one runs already for ") and place in again
        larder(shop, "night", "--quiet", environ=settings)
        assert f"{place}, of `larder redis`" in larder(shop, "check", environ=settings)
        with running(
            shop, "serve", "--port", "0", until="Larder serves on ", environ=settings
        ) as url:
            told = larder(shop, "lookup", "user_topk", "u-00001", "--url", url)
            assert " from l2, " in told.splitlines()[0]

    assert running_server(tmp_path / "state") is None
