"""Fitted models of other libraries, each made a folder that a night reads: bundle, vectors of users, clicks, settings.

Imports sources and bundles; of the libraries themselves nothing but what the caller hands over. Start at `vectors`.
"""
