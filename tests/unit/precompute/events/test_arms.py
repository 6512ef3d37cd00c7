"""Nights of an experiment's arm read the events of its control, and these stay until both have them."""

from dataclasses import replace
from pathlib import Path

import pytest

from cache.config.events import EventsConfig
from cache.errors import ConfigError
from cache.format.manifest import FORMAT_WITH_EVENTS, IncludedEvents, Manifest
from cache.format.stream_position import Position
from cache.store.artefacts import generation_path
from cache.store.erasures import request_erasure
from cache.traffic.experiments import Experiment, ExperimentArm, change_experiments
from precompute.config.settings import NightConfig
from precompute.events.files import event_files
from precompute.events.stream import EventStores, forget_events, take_events, trim_stream
from precompute.steps import retire
from precompute.steps import take_events as take_events_step
from tests.life import manifest_of
from tests.unit.precompute.events.stream import Stream

GENERATION = "20260131T000000Z-0123456789ab"


@pytest.fixture
def stream(redis_url: str, tmp_path: Path) -> Stream:
    """Three events, of which the control's nights took two over."""
    event_stream = Stream.of(redis_url, tmp_path)
    for _ in range(2):
        event_stream.add()
    take_events(event_stream.store, event_stream.client, event_stream.keys)
    event_stream.add()
    return event_stream


def arm_of(stream: Stream, redis_url: str) -> NightConfig:
    control_config = stream.config(redis_url)
    events = EventsConfig(enabled=True, namespace=control_config.namespace)
    return replace(control_config, namespace=f"{control_config.namespace}-b", events=events)


def published(config: NightConfig, until_position: Position, of: str) -> None:
    """A generation of a namespace that has a stream's events up to a position."""
    manifest = replace(
        Manifest.from_bytes(manifest_of(GENERATION, 0)), namespace=config.namespace, format=FORMAT_WITH_EVENTS,
        events=IncludedEvents(str(until_position), 10, namespace=of),
    )  # fmt: skip
    config.store().write(generation_path(GENERATION, "manifest.json"), manifest.to_bytes())


def test_both_nights_write_and_read_the_same_files(stream: Stream, redis_url: str) -> None:
    control_config, arm = stream.config(redis_url), arm_of(stream, redis_url)

    step_result = take_events_step.run(arm)

    assert step_result["events"] == 1 and stream.rows() == stream.all_rows()
    assert event_files(arm) == event_files(control_config)
    assert event_files(arm).until_position == list(stream.added)[-1]
    assert take_events_step.run(control_config)["events"] == 0
    assert arm.store().names("events") == []


def test_events_stay_until_the_generations_of_arms_have_them(stream: Stream, redis_url: str) -> None:
    control_config, arm = stream.config(redis_url), arm_of(stream, redis_url)
    positions = list(stream.added)
    published(control_config, positions[1], "")
    published(arm, positions[0], control_config.namespace)

    def trimmed() -> int:
        return trim_stream(
            EventStores.of(control_config), stream.client, stream.keys, keep_s=-60.0, stream_bytes=1 << 30
        )

    experiment = Experiment(
        "ranker", "salt", 1.0, ((0, 10_000),),
        (ExperimentArm("control", control_config.namespace, 0.5, ()), ExperimentArm("b", arm.namespace, 0.5, ())),
        created_at=0.0,
    )  # fmt: skip
    change_experiments(control_config.store(), lambda experiments: replace(experiments, experiments=(experiment,)))

    assert trimmed() == 1
    published(arm, positions[0], "")  # a stream of its own, whose positions say nothing here
    assert trimmed() == 1


def test_nights_of_an_arm_trim_and_erase_nothing_of_the_control(stream: Stream, redis_url: str) -> None:
    arm = arm_of(stream, redis_url)
    initial_rows = stream.rows()

    assert retire.run(arm, attempt="a")["events_trimmed"] == 0
    forget_events(arm, [request_erasure(arm.store(), b"u1", "user", requested_at=0.0)])

    assert stream.rows() == initial_rows and stream.client.xlen(stream.keys.events) == 3
    assert b"u1" in {event.user for event in stream.added.values()}


def test_what_was_taken_in_before_another_namespaces_events_counted_is_erased_and_trimmed(
    stream: Stream, redis_url: str, tmp_path: Path
) -> None:
    other_stream = Stream.of(redis_url, tmp_path)
    config = replace(
        stream.config(redis_url), events=EventsConfig(enabled=True, namespace=other_stream.keys.namespace, keep_s=1e-9)
    )
    take_events(stream.store, stream.client, stream.keys)

    forget_events(config, [request_erasure(stream.store, b"u1", "user", requested_at=0.0)])

    remaining_positions = [position for position, event in stream.added.items() if event.user != b"u1"]
    assert [position for position, _ in stream.rows()] == [position.number for position in remaining_positions]
    assert stream.client.xlen(stream.keys.events) == len(remaining_positions) == 2
    assert retire.run(config, attempt="a")["events_trimmed"] == len(remaining_positions)


def test_a_namespace_of_events_that_no_key_may_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"events\.namespace"):
        NightConfig(events=EventsConfig(namespace="a:b"))
