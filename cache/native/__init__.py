"""The compiled part: what numpy and Python would take too long for, and its loader.

The C sources lie beside the loader; every function has a way in Python that gives the same bytes. Imports
cache.format.records and cache.errors. Start at `loader`.
"""
