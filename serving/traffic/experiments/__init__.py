"""Experiments: the namespaces of their arms, the arm of each request, and its counts.

Start at `arms`.
"""
