"""The parts of every Transformer, one file per place; each owns its options, its module and its cost."""
