"""The demo: a whole night, a swap under traffic and a rollback, run from a clone. Start at `run`."""
