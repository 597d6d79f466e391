"""Text to ids and back: one protocol over the `tokenizers` library, its kinds, and decoding one id at a time."""
