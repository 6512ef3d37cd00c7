"""Experiments: arms that live beside each other for weeks, each a namespace with nights of its own.

Imports steps and the rooms below them. Start at `changes`.
"""
