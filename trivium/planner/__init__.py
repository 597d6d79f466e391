"""What a run will take, before it takes it."""
