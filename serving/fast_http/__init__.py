"""HTTP connections within bounds, and lookups answered on them without a parser, a task or an ASGI cycle.

Imports serving.http. Nothing but serving.app imports it. Start at `connection`.
"""
