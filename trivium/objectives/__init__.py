"""What a model learns from a row of tokens: inputs, labels and a loss, one file per family of objectives."""
