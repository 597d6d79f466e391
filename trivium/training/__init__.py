"""A run from recipe to trained model: create, loop, guard, record."""
