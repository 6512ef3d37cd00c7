"""The bench of nights that compute only what changed."""
