"""Filters at night: attributes of items, and the named filters of a generation."""
