"""Requests as values: bodies within bounds, JSON and Arrow in, options, negotiation, and errors as problems.

Imports serving.arrow_ipc. Start at `models`, then `lookup_json`.
"""
