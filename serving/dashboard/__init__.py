"""The built-in dashboard: what all workers and replicas count, as one JSON document."""
