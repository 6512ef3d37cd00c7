"""Requests and answers as values: bounded bodies, parsing of JSON and Arrow, options, refusals, answer fields.

Start at `models` and `parsing`.
"""
