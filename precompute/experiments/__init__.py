"""Experiments: arms that live beside each other for weeks, each a namespace with nights of its own.

Imports releases, erasures and the rooms below them. Start at `changes`.
"""
