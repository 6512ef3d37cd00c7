"""Benches of fresh events."""
