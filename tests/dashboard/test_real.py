"""The page of a real service, over a real night, Redis and requests."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from precompute.config import NightConfig
from serving.app import create_app
from tests.browser import Browser
from tests.dashboard import probes as probe
from tests.dashboard.faults import faults
from tests.integration.nights import build_night, histories
from tests.integration.serving_app import settings
from tests.polling import until

pytest.importorskip("serving.dashboard.board", reason="the service tells no numbers yet")


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url)


@pytest.fixture
def http(night: NightConfig) -> Iterator[httpx.Client]:
    config = uvicorn.Config(create_app(settings(night)), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        yield client
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def counted(http: httpx.Client, name: str) -> float:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return sum(each.value for family in families for each in family.samples if each.name == name)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_shows_what_metrics_tell(
    browser: Browser, http: httpx.Client, night: NightConfig, width: int, scheme: str
) -> None:
    users = [*sorted(histories(night))[:150], "nobody"]
    for _ in range(3):
        http.post("/v1/lookup/user_topk", json={"entities": users}).raise_for_status()
    answers = counted(http, "larder_answers_total")
    assert answers == 3 * len(users)
    assert until(lambda: http.get("/dashboard/data").json()["totals"]["entities"] == answers)
    browser.window(width, scheme=scheme)

    browser.open(f"{http.base_url}/dashboard")
    browser.until(probe.SHOWN)
    browser.keep(f"real-{width}-{scheme}.png")
    browser.run(probe.OPEN_ALL)

    data = http.get("/dashboard/data").json()
    assert faults(data) == []
    assert browser.run(probe.SENTENCE) == data["verdict"]["sentence"]
    text = browser.run("document.body.innerText").replace("\u00a0", " ")
    assert data["generations"][0]["generation"] in text
    assert f"{data['totals']['misses'].popitem()[1]} " in text
    assert browser.run(probe.NONSENSE) == browser.run(probe.BENT) == []
    assert browser.run(probe.FAINT) == browser.run(probe.UNLABELLED) == []
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.complaints() == []
    assert {Path(each).parts[1] for each in browser.asked()} == {http.base_url.netloc.decode()}
