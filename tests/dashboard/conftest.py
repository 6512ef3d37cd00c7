"""A browser, and a site to open in it."""

from collections.abc import Iterator

import pytest

from tests.browser import Browser, find_browser
from tests.dashboard import probes as probe
from tests.dashboard.healthy import well
from tests.dashboard.site import Site


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium-headless-shell")
    with Browser(program, tmp_path_factory.mktemp("profile")) as browser:
        browser.call("Emulation.setTimezoneOverride", timezoneId="Asia/Kathmandu")
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.window(1280)
    yield chromium
    chromium.call("Page.navigate", url="about:blank")


@pytest.fixture
def fast(browser: Browser) -> Iterator[Browser]:
    """A browser in whose pages time passes twenty times as fast."""
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=probe.FAST)
    yield browser
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(well()) as running:
        yield running
