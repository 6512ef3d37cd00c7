"""Fitted models of other libraries, each made a folder that a night reads: bundle, vectors of users, clicks, settings.

Start at `vectors`.
"""
