"""The built-in dashboard: counts of all workers and replicas as a JSON document, as a page, and in a terminal.

Start at `service`.
"""
