"""Answers as values: each field declared once, from which JSON, Arrow, OpenAPI and the client's results follow.

Imports serving.arrow_ipc for its types, and cache.format for default lists. Start at `fields`.
"""
