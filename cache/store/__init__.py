"""Artefact store: generations' files with checksums, release records, blocklist, experiments, and hosts' copies.

Start at `artefacts`.
"""
