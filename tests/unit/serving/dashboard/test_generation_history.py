"""Generations and nights as the store and the registry have them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.format.manifest import Artefact, ItemFiles, Manifest
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.night_failure import NIGHT_FAILURE_PATH as FILE_OF_FAILURE
from cache.store.releases import Release, done_path, intent_path
from serving.dashboard.generation_history import SHOWN_GENERATIONS_MAX, GenerationHistory
from serving.generations.holder import newest_pointer
from serving.generations.nights import ReleaseWatch
from tests.fakes import THREADS

G1, G2, G3 = (f"2026112{day}T000000Z-00000000000{day}" for day in (1, 2, 3))
FILE = Artefact("f", 100, "")
GATES: tuple[dict[str, Any], ...] = (
    {"rule": "recall", "passed": True, "value": 0.99, "threshold": 0.95, "note": ""},
    {"rule": "skew", "passed": False, "value": 2, "threshold": 1, "note": "far", "overridden": "ok"},
    {"rule": "drift", "passed": False, "value": None, "threshold": None, "note": "why"},
)  # fmt: skip
MANIFEST = Manifest(
    namespace="n", generation=G1, data_until=1_000, created_at=2_000, bundle_digest="",
    inputs_digest="", entity_sets={}, items=ItemFiles(FILE, FILE, FILE, FILE, 1, 1), tables={},
    models={}, indexes={}, defaults=FILE, gates=GATES,
    timings={"begin": 10.0, "score": 30.0, "verify": 5.0},
)  # fmt: skip


class Night:
    """A store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.store = ArtefactStore(str(folder))
        self.history = GenerationHistory(self.store, ReleaseWatch(self.store, THREADS).read_records)
        self.releases = 0

    def make(self, generation: str, **changes: Any) -> None:
        manifest = replace(MANIFEST, generation=generation, **changes)
        self.store.write(generation_path(generation, "manifest.json"), manifest.to_bytes())

    def release(
        self, action: Any, generation: str, reason: str = "", *, is_done: bool = True, abandoned: bool = False
    ) -> None:
        self.releases += 1
        number = self.releases
        record = Release(
            number * 10, action, generation, None, "a", 5_000.0 + number, reason, number=number, abandoned=abandoned
        )
        self.store.write(intent_path(number), record.to_bytes())
        if is_done:
            self.store.write(done_path(number), b"")

    def read(self, registry: Any = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        generations, nights = self.history.read_generations_and_nights(registry)
        return {generation["generation"]: generation for generation in generations}, nights


@pytest.fixture
def night(tmp_path: Path) -> Night:
    return Night(tmp_path)


def test_a_generation_is_shown_with_its_release_gates_and_size(night: Night) -> None:
    night.make(G1)
    night.release("publish", G1)
    night.release("publish", G2, is_done=False)
    generation = night.read({G1: {"state": "live", "at": 1.0, "reason": ""}})[0][G1]

    assert (generation["state"], generation["epoch"], generation["published_at"]) == ("live", 10, 5_001.0)
    assert (generation["data_until"], generation["bytes"], generation["records"]) == (1_000, 500, 0)
    assert [gate["verdict"] for gate in generation["gates"]] == ["passed", "overridden", "failed"]
    assert generation["gates"][2] == {
        "rule": "drift", "value": None, "threshold": None, "verdict": "failed", "note": "why",
    }  # fmt: skip


def test_a_restore_leaves_the_time_of_publication_as_it_is(night: Night) -> None:
    night.make(G1)
    night.release("publish", G1)
    published_at = night.read()[0][G1]["published_at"]
    night.release("restore", G1)

    assert night.read()[0][G1]["published_at"] == published_at == 5_001.0
    pointer = newest_pointer(night.store)
    assert pointer is not None and (pointer.epoch, pointer.published_at) == (20, published_at)


def test_remarks_about_the_inputs_of_a_night_are_shown(night: Night) -> None:
    night.make(G1, facts={"remarks": ["one user has 31% of all rows"]})
    night.make(G2)

    generations = night.read({G1: {"state": "live"}, G2: {"state": "loaded"}})[0]

    assert generations[G1]["remarks"] == ["one user has 31% of all rows"]
    assert generations[G2]["remarks"] == []


def test_steps_stand_in_the_order_of_a_night_with_the_late_ones_from_their_own_files(night: Night) -> None:
    night.make(G1)
    for step, seconds in (("load", 7.0), ("publish", 1.5)):
        times_json = orjson.dumps({"began_at": 1.0, "seconds": seconds})
        night.store.write(generation_path(G1, f"times/{step}.json"), times_json)
    night.store.write(generation_path(G1, "times/warm.json"), b"{")
    (night_row,) = night.read({G1: {"state": "superseded"}})[1]

    assert [(step_row["step"], step_row["seconds"]) for step_row in night_row["steps"]] == [
        ("begin", 10.0), ("score", 30.0), ("load", 7.0), ("verify", 5.0), ("publish", 1.5),
    ]  # fmt: skip
    assert (night_row["outcome"], night_row["began_at"]) == ("published", 2_000 - 40)


def test_a_night_tells_what_it_copied_and_an_older_version_nothing(night: Night) -> None:
    copied = {"users": {"copied": 3, "lost": 1}, "spared_s": 2.0}
    fact = {**copied, "base": G1, "why": "", "read_because": "", "nights": [copied, copied]}
    night.make(G1)
    night.make(G2, facts={"reuse": fact})
    newest_night, previous_night = night.read()[1]

    assert previous_night["reuse"] is None
    assert (newest_night["reuse"]["share"], newest_night["reuse"]["base"]) == (0.75, G1)
    assert newest_night["reuse"]["lately"]["nights"] == 2
    assert newest_night["reuse"]["lately"]["users"]["copied"] == 6


def test_without_a_registry_states_are_what_the_records_prove(night: Night) -> None:
    night.release("publish", G1)
    night.release("publish", G2)
    night.release("refuse", G3, "recall is too low")
    generations, _ = night.read()

    assert [generations[generation_id]["state"] for generation_id in (G1, G2, G3)] == ["superseded", "live", "refused"]
    assert generations[G3]["reason"] == "recall is too low" and generations[G3]["bytes"] is None


def test_without_a_registry_abandoned_canaries_and_rolled_back_generations_are_shown_as_such(night: Night) -> None:
    night.release("publish", G1)
    night.release("publish", G2)
    night.release("roll_back", G1)
    night.release("verify", G3)
    night.release("canary", G3)
    night.release("end_canary", G3, "worse", abandoned=True)
    generations, _ = night.read()

    assert [generations[generation_id]["state"] for generation_id in (G1, G2, G3)] == [
        "live",
        "rolled_back",
        "abandoned",
    ]


def test_what_changed_is_read_again_and_what_is_settled_is_not(night: Night) -> None:
    night.make(G1)
    assert len(night.read({G1: {"state": "loaded"}})[0][G1]["gates"]) == 3
    night.make(G1, gates=())
    assert night.read({G1: {"state": "verified"}})[0][G1]["gates"] == []
    assert night.read({G1: {"state": "superseded"}})[0][G1]["gates"] == []
    (Path(night.store.url) / generation_path(G1, "manifest.json")).unlink()

    assert night.read({G1: {"state": "superseded"}})[0][G1]["bytes"] == 500


def test_it_is_bounded_and_survives_a_broken_store(night: Night) -> None:
    names = [f"202611{day:02}T000000Z-0000000000{day:02}" for day in range(1, 30)]
    for generation_id in names:
        night.make(generation_id)
    night.store.write("releases/1.json", b"{")
    night.store.write(generation_path(names[-1], "manifest.json"), b"not json")
    generations, nights = night.read({"no generation": {}})

    assert list(generations) == names[: -SHOWN_GENERATIONS_MAX - 1 : -1] and len(nights) == 7
    assert generations[names[-1]]["bytes"] is None


def test_a_night_that_failed_stands_first_with_its_error(night: Night) -> None:
    night.make(G1)
    night.store.write(
        FILE_OF_FAILURE, orjson.dumps({"step": "load", "generation": None, "at": 9.0, "error": "refused: full"})
    )

    _, (failed, earlier) = night.read()

    assert (failed["outcome"], failed["generation"]) == ("failed in load", "")
    assert failed["failure"] == {"step": "load", "at": 9.0, "error": "refused: full"}
    assert (earlier["generation"], earlier["failure"]) == (G1, None)
    night.store.write(FILE_OF_FAILURE, b"")
    assert [row["generation"] for row in night.read()[1]] == [G1]


def test_a_night_that_failed_with_its_files_keeps_its_times(night: Night) -> None:
    night.make(G1)
    night.store.write(
        FILE_OF_FAILURE, orjson.dumps({"step": "publish", "generation": G1, "at": 9.0, "error": "conflict: late"})
    )

    _, (failed,) = night.read()

    assert failed["outcome"] == "failed in publish" and failed["steps"]
