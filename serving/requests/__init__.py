"""Requests and answers as values: bodies within bounds, JSON and Arrow in, options, refusals, answer fields.

Start at `models` and `parsing`.
"""
