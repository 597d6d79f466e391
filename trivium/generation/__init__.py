"""From a model to new text: sampling, the one decoding loop, and the text around it."""
