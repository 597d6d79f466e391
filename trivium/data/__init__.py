"""From a user's text to rows of token ids: sources, shards, packing, loader, batch."""
