"""The demo's click: in the list at once, in the next night, and again after a roll back; what does not hold is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.config.events import EventsConfig
from infra.demo import run as click_module
from infra.demo.checks import InvariantViolation, Judge, metric_contradictions
from infra.demo.dataset import INTERACTIONS_FILE, Dataset, make_synthetic_data
from infra.demo.run import Click
from infra.demo.synthetic import WorldSettings
from precompute.config.settings import NightConfig
from precompute.reference.train import train_reference
from precompute.steps import take_events
from serving.client import Answer, Client, EventReceipt
from serving.requests.answers import Source
from tests.integration import nights
from tests.integration.fleet import fleet
from tests.polling import poll_until

WORLD = WorldSettings(user_count=300, item_count=150, seed=4, fashion_weight=0.3)


def prepared(folder: Path, redis_url: str) -> tuple[NightConfig, Dataset]:
    """The demo's data, and a first night with events over it; the service finds its settings in a file."""
    data = replace(make_synthetic_data(WORLD), profiles=None)
    data.write(folder)
    config = nights.prepare(folder, redis_url)
    sources = replace(config.sources, interactions=(INTERACTIONS_FILE,), item_features=None)
    config = replace(config, sources=sources, events=EventsConfig(enabled=True))
    train_reference(config)
    (folder / "larder.toml").write_text("[events]\nenabled = true\n")
    nights.publish_night(config, data.first_cut.isoformat())
    return config, data


def generation_of(url: str) -> str:
    """The generation that a service answers from."""
    with Client(url) as larder:
        return larder.generations().live.generation


@pytest.mark.slow
def test_a_click_is_counted_taken_over_and_counted_again_after_a_roll_back(tmp_path: Path, redis_url: str) -> None:
    config, data = prepared(tmp_path / "night", redis_url)
    judge = Judge(history_by_user=data.histories)
    settings = {"LARDER_CONFIG": str(tmp_path / "night/larder.toml")}
    with fleet(config, tmp_path / "logs", count=1, **settings) as (service,):
        click = Click(service.url, data, judge)
        sent = click.send()
        take_events.run(config)
        second = nights.publish_night(config, data.second_cut.isoformat())
        assert poll_until(lambda: generation_of(service.url) == second, 20.0)
        taken_over = click.taken_over()
        nights.roll_back(config)
        assert poll_until(lambda: generation_of(service.url) != second, 20.0)
        counted_again = click.check_counted_again()
        metrics = httpx.get(f"{service.url}/metrics").text

    assert judge.violations == [] and metric_contradictions(metrics, judge.answers_by_source) == []
    first_line, before, after, dashboard = sent
    assert first_line.startswith(f"{click.user} clicks on {click.item}; the list reflects it ")
    assert click.item in before and click.item not in after
    assert dashboard == "dashboard: 1 accepted, 0.0 s behind"
    assert taken_over == ["the generation has the click: its list equals the live answer"]
    assert counted_again == ["the click is counted live again: the list is the same"]


class Answered(Click):
    """A click whose next answers a test lays down."""

    def __init__(self, data: Dataset, *answers: Answer) -> None:
        super().__init__("http://nobody", data, Judge())
        self._answers = iter(answers)

    def _look_up(self, max_events: int | None = None) -> Answer:
        del max_events
        return next(self._answers)


def answer(*items: str, **more: Any) -> Answer:
    """An answer of the night's, unless it says otherwise."""
    fields: dict[str, Any] = {
        "id": "u", "table": "user_topk", "source": Source.L2, "producer": "batch", "generation": "g",
        "age_seconds": 1.0, "published_at": "2026-01-31T12:00:00Z", "items": items,
    }  # fmt: skip
    return Answer(**(fields | more))


LIVE = answer("b", "c", producer="live", source=Source.LIVE, events=1)


@pytest.mark.parametrize(
    ("night_answer", "expected_error"),
    [
        (answer("a", "b", producer="live", events=1), "did not read the click"),
        (answer("b", "d"), "was answered \\('b', 'c'\\), now \\('b', 'd'\\)"),
    ],
)
def test_a_night_that_lacks_the_click_or_answers_otherwise_breaks_the_demo(
    night_answer: Answer, expected_error: str
) -> None:
    click = Answered(replace(make_synthetic_data(WORLD), profiles=None), night_answer)
    click._live_answer = LIVE

    with pytest.raises(InvariantViolation, match=expected_error):
        click.taken_over()


def test_a_list_that_is_only_about_right_is_not_compared() -> None:
    click = Answered(replace(make_synthetic_data(WORLD), profiles=None), answer("b", "d"))
    click._live_answer = replace(LIVE, approximate=True)

    assert click.taken_over() == []


def test_who_clicks_has_nothing_else_to_come() -> None:
    data = replace(make_synthetic_data(WORLD), profiles=None)
    click = Answered(data)

    assert click.user in data.histories
    assert click.user not in data.arriving_users


def test_an_open_dashboard_is_polled_until_it_shows_the_click(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = {"counted_until": "1-0", "results": {}, "lag_s": 0.0}
    fresh_events = {"counted_until": "2-0", "results": {"accepted": 1}, "lag_s": 0.0}
    uncounted = stale | {"counted_until": "2-0"}
    documents = iter([{}, {"events": stale}, {"events": uncounted}, {"events": fresh_events}])

    def get(_url: str) -> httpx.Response:
        return httpx.Response(200, json=next(documents, {"events": stale}))

    monkeypatch.setattr(httpx, "get", get)
    click = Answered(replace(make_synthetic_data(WORLD), profiles=None))
    receipt = EventReceipt(1, 0, (), "everysec", "2-0")

    assert click._check_dashboard(receipt) == "dashboard: 1 accepted, 0.0 s behind"
    monkeypatch.setattr(click_module, "WAIT_S_MAX", 0.2)
    with pytest.raises(InvariantViolation, match="does not show event 2-0"):
        click._check_dashboard(receipt)
