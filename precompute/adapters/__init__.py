"""Imports of fitted models of other libraries: each becomes a folder of bundle, users' vectors, clicks and settings.

Start at `vectors`.
"""
