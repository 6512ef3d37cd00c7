"""The demo: two nights, a service under traffic, and a roll back, all run from a clone. Start at `run`."""
