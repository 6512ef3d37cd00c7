"""The built-in dashboard."""
