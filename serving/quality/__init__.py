"""Whether the answers are good: re-scored samples of them, why records are missing, what is read and what is not."""
