"""Gate rules: a module for each family, a function for each rule; `judge` runs them."""
