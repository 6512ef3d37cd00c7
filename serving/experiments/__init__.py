"""Experiments: the arms' namespaces that a replica holds, which of them answers a request, and what is counted of it.

Imports lookup and the rooms below it. Start at `router`.
"""
