"""Public models that the bench `models` onboards: clicks that they are fitted on, and a function that fits each."""
