"""A run from recipe to trained model: prepare, loop, guard, record."""
