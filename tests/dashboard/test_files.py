"""The dashboard's files over HTTP: types, headers, what is cached, what is not there; and that they are installed."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from setuptools import Distribution
from starlette.applications import Starlette

import serving.dashboard
from serving.dashboard.attach import DASHBOARD_PAGE
from serving.http.static_files import PAGE_HEADERS

FOLDER = Path(str(serving.dashboard.__file__)).parent / "page"
ROOT = Path(__file__).parents[2]
CONTENT = {file.name: file.read_bytes() for file in FOLDER.iterdir()}
TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(Starlette(routes=DASHBOARD_PAGE.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://larder") as client:
        yield client


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
async def test_every_file_is_sent_as_what_it_is(http: httpx.AsyncClient, file: Path) -> None:
    path = "/dashboard" if file.name == "index.html" else f"/dashboard/{file.name}"

    answer = await http.get(path)

    assert answer.status_code == 200
    assert answer.content == CONTENT[file.name]
    assert answer.headers["content-type"].partition(";")[0] == TYPES[file.suffix[1:]]
    assert answer.headers.items() >= {(name.lower(), value) for name, value in PAGE_HEADERS.items()}


async def test_nothing_may_come_from_elsewhere_or_stand_in_the_markup(http: httpx.AsyncClient) -> None:
    policy = (await http.get("/dashboard")).headers["content-security-policy"]
    markup = (FOLDER / "index.html").read_text()

    assert policy.startswith("default-src 'self';") and "unsafe" not in policy
    assert not re.search(r"https?://|\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", markup)


async def test_what_a_browser_has_is_not_sent_again(http: httpx.AsyncClient) -> None:
    etag = (await http.get("/dashboard/main.js")).headers["etag"]

    for if_none_match in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = await http.get("/dashboard/main.js", headers={"If-None-Match": if_none_match})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
    mismatch_response = await http.get("/dashboard/main.js", headers={"If-None-Match": '"other"'})
    assert mismatch_response.status_code == 200


async def test_head_tells_the_length_without_the_body(http: httpx.AsyncClient) -> None:
    get_response = await http.get("/dashboard")
    head = await http.head("/dashboard")

    assert head.content == b""
    assert dict(head.headers) == dict(get_response.headers)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/dashboard/index.html", 404),
        ("GET", "/dashboard/../pages.py", 404),
        ("GET", "/dashboard/%2e%2e/pages.py", 404),
        ("GET", "/dashboard/data", 404),
        ("POST", "/dashboard", 405),
        ("DELETE", "/dashboard/main.js", 405),
    ],
)
async def test_nothing_else_is_there(http: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    assert (await http.request(method, path)).status_code == status


async def test_a_slash_at_the_end_leads_to_the_page_also_behind_a_prefix(http: httpx.AsyncClient) -> None:
    answer = await http.get("/dashboard/")

    assert (answer.status_code, answer.headers["location"]) == (308, "../dashboard")


def test_files_name_only_files_that_are_there() -> None:
    markup = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', (FOLDER / "index.html").read_text())
    modules = {
        f"dashboard/{name}"
        for file in FOLDER.glob("*.js")
        for name in re.findall(r'from "\./([^"]+)"', file.read_text())
    }

    assert {f"/{asset_path}" for asset_path in {*markup, *modules}} <= set(DASHBOARD_PAGE.assets())


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.js")), ids=lambda file: file.name)
def test_no_script_makes_markup_or_code_of_text(file: Path) -> None:
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", file.read_text()
    )


def test_an_installation_has_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()

    files = {package: set(names) for package, _, _, names in build.data_files}

    assert files["serving.dashboard"] == {f"page/{page_file.name}" for page_file in FOLDER.iterdir()}
    docs_page = ROOT / "serving/http/docs_page"
    assert files["serving.http"] == {f"docs_page/{docs_page_file.name}" for docs_page_file in docs_page.iterdir()}
