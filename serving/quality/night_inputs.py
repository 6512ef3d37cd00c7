"""Inputs that the night computed users from, as far as its probe tells."""

import logging
from dataclasses import dataclass

from cache.format.ids import hash_id
from cache.format.manifest_files import Artefact
from cache.model.input_preparation import LiveInput
from cache.model.input_sample import FACT, Probe
from cache.store.artefacts import ArtefactStore, fetch_checked
from serving.generations.snapshot import Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class NightInputs:
    """Inputs of one generation's users."""

    probe: Probe
    seed: int

    def of(self, raw: bytes) -> LiveInput | None:
        """Input of a user; None where it is not in the probe."""
        return self.probe.of(hash_id(raw, self.seed))


def open_inputs(store: ArtefactStore, snapshot: Snapshot) -> NightInputs | None:
    """Fetches, checks and maps a probe; None where there is none or it is damaged: then user tables go unjudged."""
    described = snapshot.manifest.facts.get(FACT)
    if not described:
        return None
    try:
        artefact = Artefact(**described)
        fetch_checked(store, snapshot.generation, artefact)
        probe = Probe.open(snapshot.root / artefact.path, snapshot.items)
        return NightInputs(probe, snapshot.directories["user"].seed)
    except Exception:
        log.warning("the probe of %s cannot be read", snapshot.generation, exc_info=True)
        return None
