"""The label that no loss counts."""

IGNORED = -100  # PyTorch's own `ignore_index`
