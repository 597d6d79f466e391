"""How good a model is: likelihood, tasks, translation."""
