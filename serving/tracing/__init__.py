"""A request under observation: its id, its trace context, spans, one line in the log, and what that may not say.

Imports serving.requests at most. Start at `observer`.
"""
