"""The compiled part: what numpy and Python would take too long for, and its loader.

The C sources lie beside the loader; every function has a twin in Python, in `pure`, that gives the same bytes.
Start at `loader`.
"""
