"""Quality of answers: code shared by night and service that computes a sample of the answers once more."""
