"""`python -m serving` that soon claims what other consumers of the inbox left unfinished: for tests only."""

import sys

import serving.events.intake
from serving.__main__ import main

if __name__ == "__main__":
    # Claim after half a second instead of half a minute, also from slow consumers that live, so entries come twice.
    vars(serving.events.intake).update(CLAIM_AFTER_MS=500, CLAIM_EVERY_S=0.25)
    sys.exit(main())
