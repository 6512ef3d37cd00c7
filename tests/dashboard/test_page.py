"""The dashboard's page in a real Chromium: what it shows, and to whom."""

import itertools
import json
from typing import Any

import pytest

from tests.browser import Browser
from tests.dashboard import probes as probe
from tests.dashboard.cases import CASES, HOSTILE
from tests.dashboard.colours import VISIONS, contrast, distance
from tests.dashboard.healthy import well
from tests.dashboard.site import Site, open_page
from tests.polling import poll_until

LAPTOP, PHONE = 1280, 390
APPEARANCES = [("well", width, scheme) for width in (LAPTOP, PHONE) for scheme in ("light", "dark")] + [
    (name, *appearance) for name in CASES if name != "well" for appearance in ((LAPTOP, "dark"), (PHONE, "light"))
]


@pytest.mark.parametrize(("name", "width", "scheme"), APPEARANCES)
def test_every_case_is_drawn_whole(browser: Browser, site: Site, name: str, width: int, scheme: str) -> None:
    site.data = CASES[name]()
    browser.window(width, scheme=scheme)

    open_page(browser, site)
    browser.keep(f"{name}-{width}-{scheme}.png")
    browser.run(probe.OPEN_ALL)
    browser.run("new Promise(requestAnimationFrame)")

    assert browser.run(f"{probe.SENTENCE}.length") > 10
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run(probe.NONSENSE) == []
    assert browser.run(probe.BENT) == []
    assert browser.run(probe.FAINT) == []
    assert browser.run(probe.UNLABELLED) == []
    assert browser.run("window.struck") is None
    assert browser.run("document.querySelectorAll('main script, main img').length") == 0
    assert [
        requested_url
        for requested_url in browser.requested_urls()
        if not requested_url.startswith(f"http://{site.host}/")
    ] == []
    assert browser.complaints() == []


def test_the_numbers_are_those_of_the_data(browser: Browser, site: Site) -> None:
    open_page(browser, site)

    text = browser.run("document.body.innerText").replace("\u00a0", " ")

    assert browser.run(probe.LEVEL) == "ok"
    assert site.data["verdict"]["sentence"] in text  # type: ignore[index]
    for expected in (
        "4.81M since the start", "1.37 GiB of 2 GiB", "302K · 60.7 %", "closed in 4", "41 of 4,096 at most",
        "9 h", "1 of 8 gates failed", "volatile-lru", "98.7 % (98.5 % to 98.9 %)", "none found", "serve-b",
        "68.2 %, doubling adds", "204/s accepted in the last 5 minutes, 61.2K of 62.3K",
        "4.1 % of the answers", "18.7 %", "9 MiB of 256 MiB", "too many", "everysec, demanded: everysec",
        "Of the users of the last 14 nights 87.1 % were copied; 19 min 40 s of scoring spared",
    ):  # fmt: skip
        assert expected in text, expected


def test_no_two_landmarks_have_the_same_name(browser: Browser, site: Site) -> None:
    open_page(browser, site)
    browser.run(probe.OPEN_ALL)

    assert browser.run(probe.SAME_LANDMARKS) == []


@pytest.mark.parametrize("width", [1920, LAPTOP, 1000, PHONE])
def test_no_figure_breaks_its_unit_off(browser: Browser, site: Site, width: int) -> None:
    data = well()
    site.data = data | {"schedule": {**(data["schedule"] or {}), "age_s": 856.0}}
    browser.window(width)
    open_page(browser, site)

    assert browser.run("document.querySelector('#figures').textContent").count("14\u00a0min\u00a016\u00a0s") == 1
    broken = """[...document.querySelectorAll('#figures .big')].filter((each) => {
      const range = document.createRange();
      range.selectNodeContents(each);
      const lines = new Set([...range.getClientRects()].map((line) => Math.round(line.top)));
      return lines.size > 1;
    }).map((each) => each.textContent)"""
    assert browser.run(broken) == []


def test_a_reason_that_ends_with_a_full_stop_is_followed_by_none(browser: Browser, site: Site) -> None:
    data = CASES["without_redis"]()
    data["trouble"] = "Error 111 connecting to localhost:6379. Connection refused."
    site.data = data
    browser.window(LAPTOP)
    open_page(browser, site)

    assert "Connection refused." in browser.run("document.body.textContent")
    assert ".." not in browser.run("document.body.textContent")


def test_an_old_table_of_generations_says_its_age(browser: Browser, site: Site) -> None:
    text = "document.querySelector('#nights').textContent.replaceAll('\\u00a0', ' ')"
    site.data = well()
    open_page(browser, site)
    assert "As of" not in browser.run(text)

    data: Any = well()
    data["generations_at"] = data["now"] - 312
    site.data = data
    open_page(browser, site)
    assert "As of 5 min 12 s ago." in browser.run(text)


def test_events_have_a_part_and_a_link_only_where_they_are_taken_in(fast: Browser, site: Site) -> None:
    parts = "['#events', 'nav a[href=\"#events\"]'].map((each) => document.querySelector(each).checkVisibility())"
    site.data = well() | {"events": None}
    open_page(fast, site)
    assert fast.run(parts) == [False, False]

    data: Any = well()
    data["events"] |= {"up": False, "lag_s": 31.0, "taken_until": "0-0", "refused": {"events_full": 12}}
    site.data = data
    fast.wait_until(f"{parts}.every(Boolean)")

    text = fast.run("document.getElementById('events').innerText").replace("\u00a0", " ")
    for expected in (
        "no events are accepted", "31 s", "none yet", "Refused whole, 12 times: events full.",
        data["events"]["counted_until"],
    ):  # fmt: skip
        assert expected in text, expected
    # The chart is drawn at once, although it had no width while its part was hidden.
    assert fast.run("document.querySelectorAll('#events .canvas path').length") == 3
    assert fast.complaints() == []


def test_what_the_service_adds_up_itself_goes_first(browser: Browser, site: Site) -> None:
    data: Any = well(bins=0)
    data["lately"] = {
        "answers": {"l1": 30, "l2": 60, "live": 10, "previous": 0, "default": 0},
        "latency": {"l1": {"p50": 0.001, "p99": 0.0123, "p999": 0.05}},
    }
    site.data = data

    open_page(browser, site)

    figures = browser.run("document.getElementById('figures').innerText").replace("\u00a0", " ")
    assert "90 %" in figures and "of 100 answers" in figures and "12.3 ms" in figures
    assert browser.complaints() == []


def test_hostile_texts_are_shown_as_they_are(browser: Browser, site: Site) -> None:
    site.data = CASES["hostile"]()

    open_page(browser, site)

    assert browser.run(probe.SENTENCE) == HOSTILE
    assert browser.run(f"document.body.innerText.split({json.dumps(HOSTILE)}).length") > 30


def test_the_legend_shows_the_values_at_the_pointer_and_stays_so(fast: Browser, site: Site) -> None:
    open_page(fast, site)
    legend = "document.querySelector('.legend .value').textContent"
    cursor = "document.querySelector('.cursor').getAttribute('visibility')"
    newest_text = fast.run(legend)
    left_px, top, width = fast.run(
        "(({ left, top, width }) => [left, top, width])(document.querySelector('.canvas').getBoundingClientRect())"
    )

    # Point at the flip in the middle of the hour, where L1 is cold.
    fast.call("Input.dispatchMouseEvent", type="mouseMoved", x=left_px + 52 + (width - 52) * 0.555, y=top + 50)

    fast.wait_until(f"{cursor} === 'visible'")
    assert fast.run(f"parseFloat({legend})") < 50 < float(newest_text.split()[0])
    assert fast.run("document.querySelectorAll('.cursor[visibility=visible]').length") == 9
    request_count = site.request_count
    assert poll_until(lambda: site.request_count > request_count + 1)
    assert fast.run(f"parseFloat({legend})") < 50
    fast.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    fast.wait_until(f"{legend} === {json.dumps(newest_text)}")


def test_structure_is_there_for_who_does_not_see_it(browser: Browser, site: Site) -> None:
    open_page(browser, site)

    headings = browser.run(probe.HEADINGS)

    assert headings.count(1) == 1
    assert all(below - above <= 1 for above, below in itertools.pairwise(headings))
    assert set(browser.run(probe.LANDMARKS).values()) == {1}
    assert browser.run("document.documentElement.lang") == "en"


def test_the_keyboard_reaches_everything_in_order(browser: Browser, site: Site) -> None:
    open_page(browser, site)
    reachable = browser.run(f"{probe.TABBABLE}.length")

    visited = []
    for _ in range(reachable):
        browser.press("Tab")
        visited.append(browser.run(probe.FOCUS))

    assert [focus_state["place"] for focus_state in visited] == list(range(reachable))
    assert all(focus_state["isSeen"] and focus_state["outline"] >= 2 for focus_state in visited)


def test_the_skip_link_leads_to_the_numbers_and_enter_opens_a_table(browser: Browser, site: Site) -> None:
    open_page(browser, site)

    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"
    browser.press("Enter")
    assert browser.run("document.activeElement.id") == "main"
    browser.press("Tab")
    assert browser.run("document.activeElement.tagName") == "SUMMARY"
    browser.press("Enter")

    browser.wait_until("document.querySelector('details.tabular[open] tbody tr th time') !== null")


def test_times_are_of_the_viewers_zone_and_tell_utc(browser: Browser, site: Site) -> None:
    open_page(browser, site)

    shown_times = browser.run(
        "[...document.querySelectorAll('#nights time')].map((each) => [each.textContent, each.title])"
    )

    # The zone is 5:45 ahead of UTC.
    assert any("07:45" in text and title == "2026-11-22 02:00:00 UTC" for text, title in shown_times)
    assert "Asia/" in browser.run("document.getElementById('zone').textContent")


TONES = {
    "sources": ("l1", "l2", "live", "previous", "default"),
    "steps": ("n1", "n2", "n3", "n4", "n5", "n6", "n7", "rest"),
    "quantiles": ("depth-1", "depth-2", "depth-3"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tones_are_distinguishable_under_every_vision(browser: Browser, site: Site, scheme: str) -> None:
    browser.window(LAPTOP, scheme=scheme)
    open_page(browser, site)

    for names in TONES.values():
        colour_by_name = browser.run(f"{probe.COLOURS}({json.dumps(['paper', *names])})")
        paper = colour_by_name.pop("paper")

        # WCAG 2.2, 1.4.11
        assert [name for name, tone in colour_by_name.items() if contrast(tone, paper) < 3] == []
        for vision in VISIONS:
            close = [
                (left_name, right)
                for left_name, right in itertools.combinations(names, 2)
                if distance(colour_by_name[left_name], colour_by_name[right], vision) < 10
            ]
            assert close == [], vision
