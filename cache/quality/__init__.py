"""Quality of answers: code that the night and the service use to recompute a sample of the answers."""
