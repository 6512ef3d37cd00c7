"""The page of the routes: its own files under strict headers, drawn in a real Chromium from the service's document."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from precompute.config.settings import NightConfig
from serving.http.static_files import PAGE_HEADERS
from tests.browser import Browser
from tests.dashboard import probes as probe
from tests.integration.nights import build_night, histories
from tests.integration.program import environment, started

FOLDER = Path(__file__).parents[2] / "serving/http/docs_page"
METHODS = ("get", "post", "put", "patch", "delete")
DRAWN = "document.querySelectorAll('.route').length > 0"
ROUTES = "[...document.querySelectorAll('.route')].map((each) => each.id)"
OPEN_ROUTES = "document.querySelectorAll('.route').forEach((each) => (each.open = true))"


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=60, items=40)


@pytest.fixture(scope="module")
def url(night: NightConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("state")
    with started(environment(night, state, REDIS_URL=str(night.redis_url))) as (_, url):
        yield url


def test_nothing_of_the_documentation_comes_from_another_host(url: str) -> None:
    page = httpx.get(f"{url}/docs")
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', page.text)

    assert page.status_code == 200
    assert page.headers.items() >= {(name.lower(), value) for name, value in PAGE_HEADERS.items()}
    assert not re.search(r"//|\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", page.text[15:])
    assert {"docs/main.js", "docs/docs.css"} <= set(loaded)
    for asset_path in loaded:
        assert httpx.get(f"{url}/{asset_path}").status_code == 200, asset_path
    for path in ("/redoc", "/docs/oauth2-redirect"):
        assert httpx.get(url + path).status_code == 404


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*")), ids=lambda file: file.name)
def test_no_file_names_another_host_or_makes_markup_of_text(file: Path) -> None:
    assert not re.findall(
        r"://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", file.read_text()
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_every_route_is_drawn_and_nothing_is_asked_of_others(browser: Browser, url: str, width: int) -> None:
    document: Any = httpx.get(f"{url}/openapi.json").json()
    expected = [
        f"{method}-{path}" for path, item in document["paths"].items() for method in METHODS
        if method in item
    ]  # fmt: skip
    browser.window(width)

    browser.open(f"{url}/docs")
    browser.wait_until(DRAWN)
    browser.run(OPEN_ROUTES)
    browser.run("new Promise(requestAnimationFrame)")

    assert browser.run(ROUTES) == expected
    text = browser.run("document.body.innerText")
    assert "X-Larder-Arm" in text and "/v1/lookup/{table}" in text
    assert not re.search(r"\b(NaN|undefined|Infinity)\b|\[object", text)
    assert browser.run(probe.FAINT) == []
    assert browser.run("document.documentElement.scrollWidth") == width
    assert [
        requested_url for requested_url in browser.requested_urls() if not requested_url.startswith(f"{url}/")
    ] == []
    assert browser.complaints() == []


def test_a_request_can_be_tried(browser: Browser, url: str, night: NightConfig) -> None:
    user = min(histories(night))
    browser.open(f"{url}/docs")
    browser.wait_until(DRAWN)
    route = "document.getElementById('get-/v1/lookup/{table}/{entity}')"
    browser.run(f"({route}.open = true)")
    field = (
        f"[...{route}.querySelectorAll('.fields label')]"
        ".find((each) => each.firstChild.textContent === '%s').querySelector('input')"
    )
    browser.wait_until(f"{route}.querySelector('button') !== null")
    for name, value in (("table", "user_topk"), ("entity", user), ("k", "3")):
        browser.run(f"({field % name}).value = {value!r}")

    browser.run(f"{route}.querySelector('button').click()")

    browser.wait_until(f"{route}.querySelector('[role=status]').textContent.startsWith('200 ')")
    browser.keep("docs.png")
    assert f'"id": "{user}"' in browser.run(f"{route}.querySelector('pre').textContent")
    assert browser.complaints() == []
