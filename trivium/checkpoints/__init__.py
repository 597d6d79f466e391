"""Checkpoints: a folder of safetensors and JSON files under a sealed manifest, and the store that keeps them."""
