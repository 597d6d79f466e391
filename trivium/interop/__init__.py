"""Checkpoints from and to the rest of the world."""
