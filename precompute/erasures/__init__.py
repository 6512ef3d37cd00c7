"""Erasures: entities whose data no later night may hold, and which generations still do."""
