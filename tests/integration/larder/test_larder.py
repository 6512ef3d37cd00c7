"""`larder`, from a folder of CSV files to answers, each command as a program of its own, on a real Redis."""

import csv
import json
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cache.process.redis_server import RedisServer, running_server
from infra.demo.synthetic import WorldSettings, synthesize
from tests.integration.larder.commands import larder, running


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a shop's own files, under a shop's own names."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "exports").mkdir()
    clicks = synthesize(WorldSettings(user_count=300, item_count=100, seed=1))
    with (folder / "exports" / "click log.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["device", "visitorId", "Article_ID", "occurred_at", "plays"])
        for user, item, moment in zip(clicks.user_rows, clicks.item_rows, clicks.times_us, strict=True):
            names = clicks.user_ids[user], clicks.item_ids[item]
            lines.writerow(["phone", *names, int(moment) // 1_000_000, 1])
    return folder


def test_from_a_folder_to_answers(shop: Path, redis_server: RedisServer) -> None:
    redis = {"REDIS_URL": redis_server.url, "LARDER_NAMESPACE": f"test-{uuid.uuid4().hex[:12]}"}

    output = larder(shop, "init", "exports")
    assert "user = visitorId, item = Article_ID, timestamp = occurred_at, weight = plays" in output
    check_lines = json.loads(larder(shop, "check", "--json", code=3, environ=redis))
    assert {check_line["what"] for check_line in check_lines if check_line["state"] == "to do"} == {"bundle"}

    output = larder(shop, "train", "--quiet")
    assert " were among 20 suggestions: the best of " in output
    larder(shop, "check", environ=redis)
    assert " gates passed" in larder(shop, "night", environ=redis)
    status = json.loads(larder(shop, "status", "--json", code=3, environ=redis))  # nobody serves
    (generation,) = [generation_report["generation"] for generation_report in status["generations"]]

    with running(shop, "serve", "--port", "0", line_prefix="Larder serves on ", environ=redis) as url:
        answer = json.loads(larder(shop, "lookup", "user_topk", "u-00001", "--k", "5", "--url", url, "--json"))
        assert (answer["source"], answer["generation"]) == ("l2", generation)
        assert len(answer["items"]) == 5

        lookup_output = larder(shop, "lookup", "user_topk", "u-00001", "--k", "5", "--url", url)
        assert lookup_output.splitlines()[0].startswith("user_topk u-00001: 5 items from l1, ")
        assert [line.split()[1] for line in lookup_output.splitlines()[1:]] == answer["items"]

        history = ",".join(answer["items"][:2])
        live = larder(shop, "lookup", "user_topk", "new", "--history", history, "--url", url)
        assert "from live, reason not_in_generation" in live.splitlines()[0]

        for table, kind in (("user_vector", "numbers"), ("user_affinity", "numbers")):
            assert f" {kind} from l2" in larder(shop, "lookup", table, "u-00001", "--url", url)
        explanation = json.loads(larder(shop, "explain", "user_topk", "u-00001", "--url", url, "--json"))
        assert explanation["answer"]["tier"] == "l1"

        refused = larder(shop, "lookup", "nothing", "u-00001", "--url", url, code=1)
        assert "there is no table 'nothing'; its tables are item_similar," in refused
        assert refused.startswith("larder: ") and refused.count("\n") == 1

        # With --json, the output of every command is JSON only.
        data_until = datetime.now(UTC).isoformat(timespec="seconds")
        night_report = json.loads(larder(shop, "night", "--json", "--data-until", data_until, environ=redis))
        assert [step["step"] for step in night_report["steps"]][:2] == ["begin", "embed_items"]
        generation = night_report["generation"]
        erased = json.loads(larder(shop, "erase", "--list", "--json", environ=redis))
        assert erased == {"erasures": [], "overlays_dropped": None, "notes": []}
        top = json.loads(larder(shop, "top", "--url", url, "--json", environ=redis))
        assert top["verdict"]

        later_status = json.loads(larder(shop, "status", "--json", environ=redis))
        assert (later_status["live"], len(later_status["replicas"])) == (generation, 1)


def test_without_a_redis_one_is_started_for_all(shop: Path, tmp_path: Path) -> None:
    settings = {"LARDER_STATE": str(tmp_path / "state"), "LARDER_ARTIFACTS": str(tmp_path / "store")}
    larder(shop, "init", "exports", "--force")
    larder(shop, "train", "--quiet", environ=settings)

    with running(shop, "redis", line_prefix="Redis runs at ", environ=settings) as address:
        server = running_server(tmp_path / "state")
        assert server is not None and server.url.endswith(f"{address}/0")
        refusal = larder(shop, "redis", code=2, environ=settings)
        assert refusal.startswith("larder: a Redis already runs for ") and address in refusal
        larder(shop, "night", "--quiet", environ=settings)
        assert f"{address}, started by `larder redis`" in larder(shop, "check", environ=settings)
        with running(shop, "serve", "--port", "0", line_prefix="Larder serves on ", environ=settings) as url:
            lookup_output = larder(shop, "lookup", "user_topk", "u-00001", "--url", url)
            assert " from l2, " in lookup_output.splitlines()[0]

    assert running_server(tmp_path / "state") is None
