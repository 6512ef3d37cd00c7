"""Experiments: the namespaces of their arms, which of them answers a request, and what is counted of it.

Start at `arms`.
"""
