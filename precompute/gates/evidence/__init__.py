"""Evidence that gates share: a candidate, its samples, scans of its records, and the verdict of a rule."""
