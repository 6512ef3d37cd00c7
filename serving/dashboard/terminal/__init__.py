"""The dashboard in a terminal (`python -m serving top`).

Imports serving.dashboard. Start at `command`.
"""
