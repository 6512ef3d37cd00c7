"""The page while time passes: it updates, gets old, rests, and asks for a token."""

import re
from typing import Any

import pytest

from tests.browser import Browser
from tests.dashboard import probes as probe
from tests.dashboard.healthy import well
from tests.dashboard.site import Site, open_page

UNKNOWN = "The service does not know this token."


def test_it_updates_by_itself_and_leaves_the_reader_alone(fast: Browser, site: Site) -> None:
    open_page(fast, site)
    fast.run("document.querySelector('.generations details').open = true")
    fast.run("document.querySelector('.generations summary').focus()")
    later: Any = well(now_s=well()["now"] + 60)  # type: ignore[operator]
    later["verdict"] = {"level": "warn", "sentence": "The night is late.", "advice": "Look at Airflow."}  # fmt: skip
    later["generations"][0]["bytes"] = 123 << 20
    site.data = later

    fast.wait_until(f"{probe.SENTENCE} === 'The night is late.'")

    assert fast.run(probe.LEVEL) == "warn"
    assert fast.run("document.getElementById('advice').textContent") == "Look at Airflow."
    assert "The night is late" in fast.run("document.title")
    assert "123" in fast.run("document.querySelector('.generations summary').textContent")
    assert fast.run("document.querySelector('.generations details').open") is True
    assert fast.run("document.activeElement === document.querySelector('.generations summary')")
    assert fast.complaints() == []


def test_what_is_old_looks_old_until_new_numbers_come(fast: Browser, site: Site) -> None:
    open_page(fast, site)

    site.status = 503
    fast.wait_until(probe.IS_STALE)

    assert fast.run(probe.LEVEL) == "unknown"
    assert "not known" in fast.run(probe.SENTENCE)
    assert "All is well" in fast.run("document.getElementById('advice').textContent")
    assert re.match(r"No contact; .+ old", fast.run(probe.AGE))
    assert fast.run(probe.FAINT) == []

    site.status = 200
    fast.wait_until(f"!{probe.IS_STALE}")
    assert fast.run(probe.LEVEL) == "ok"


def test_a_service_that_has_gone_is_said_to_be_away(fast: Browser, site: Site) -> None:
    open_page(fast, site)

    site.leave()
    fast.wait_until(probe.IS_STALE)

    assert "it cannot be reached" in fast.run("document.getElementById('advice').textContent")


def test_it_polls_less_often_while_requests_fail(browser: Browser, site: Site) -> None:
    open_page(browser, site)

    periods = browser.run("""import('./dashboard/poll.js').then(({ Poller }) =>
      [0, 1, 2, 3, 4, 50].map((failures) => Object.assign(new Poller({}), { failures }).period))""")

    assert periods == [5_000, 10_000, 20_000, 40_000, 60_000, 60_000]


@pytest.mark.parametrize(
    ("leave", "come_back"),
    [
        ("document.getElementById('pause').click()", "document.getElementById('pause').click()"),
        (
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true })",
            "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))",
        ),
    ],
    ids=["paused", "hidden"],
)
def test_a_paused_or_hidden_page_sends_no_requests(fast: Browser, site: Site, leave: str, come_back: str) -> None:
    open_page(fast, site)
    fast.run(leave)
    request_count = site.request_count

    fast.wait_until(probe.IS_STALE)  # four periods later

    assert site.request_count <= request_count + 1  # one may have been on its way
    fast.run(come_back)
    fast.wait_until(f"!{probe.IS_STALE}")
    assert site.request_count > request_count


def test_a_token_without_the_scope_gets_a_message_that_says_so(browser: Browser, site: Site) -> None:
    site.token = "s3cret"
    browser.open(site.url)
    browser.wait_until("document.activeElement.id === 'token'")
    site.status = 403

    browser.write("s3cret")
    browser.press("Enter")

    scope_message = "The service knows this token, but it lacks the scope admin."
    browser.wait_until(f"document.getElementById('ask-why').textContent === {scope_message!r}")
    site.status = 200


@pytest.mark.parametrize("token", ["s3cret", "gehéim✓"])
def test_a_token_is_asked_for_kept_in_the_tab_and_sent_as_a_header(browser: Browser, site: Site, token: str) -> None:
    site.token = token
    browser.open(site.url)
    browser.wait_until("document.activeElement.id === 'token'")
    assert browser.run("document.getElementById('numbers').checkVisibility()") is False
    assert browser.run(probe.SENTENCE) == "The service asks for its token."
    assert browser.run(probe.FAINT) == browser.run(probe.UNLABELLED) == []

    browser.write("wrong")
    browser.press("Enter")
    browser.wait_until(f"document.getElementById('ask-why').textContent === {UNKNOWN!r}")
    browser.write(token)
    browser.press("Enter")
    browser.wait_until(probe.IS_UPDATED)

    assert browser.run("document.getElementById('ask').checkVisibility()") is False
    assert browser.run("[localStorage.length, document.cookie]") == [0, ""]
    assert all(
        token not in requested_url and "wrong" not in requested_url for requested_url in browser.requested_urls()
    )
    open_page(browser, site)  # a reload does not ask again
    assert browser.complaints() == []
    browser.run("sessionStorage.clear()")
