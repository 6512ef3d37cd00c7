"""Benches of a night's scoring on a GPU, and the session that runs them after the tests (`make gpu`)."""
