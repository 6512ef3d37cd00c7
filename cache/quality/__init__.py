"""Quality of answers: what night and service share to compute a sample of them once more."""
