"""The built-in dashboard: what all workers and replicas count, as one JSON document and one page.

Imports serving.replica, serving.usage and the rooms below them. Start at `service`.
"""
