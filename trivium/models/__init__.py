"""Three families from the same parts: encoder, decoder and encoder-decoder."""
