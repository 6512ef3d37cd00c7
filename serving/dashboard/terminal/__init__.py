"""The dashboard in a terminal (`larder top`).

Imports serving.dashboard. Start at `command`.
"""
