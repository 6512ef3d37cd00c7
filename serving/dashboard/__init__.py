"""The built-in dashboard: what all workers and replicas count, as one JSON document and one page.

Imports serving.events and the rooms below it. Start at `service`.
"""
