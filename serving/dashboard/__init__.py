"""The built-in dashboard: what all workers and replicas count, as one JSON document, one page, and in a terminal.

Start at `service`.
"""
