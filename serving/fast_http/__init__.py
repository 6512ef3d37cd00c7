"""HTTP connections within bounds, and lookups answered on them without a parser, a task or an ASGI cycle.

Imports serving.http and serving.fast_lookup. Start at `connection`.
"""
