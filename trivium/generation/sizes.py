"""Few sizes mean few graphs: what is asked for becomes the next of them."""

from __future__ import annotations


def bucket(size: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << (size - 1).bit_length())


def close(size: int, least: int) -> int:
    """The next step of an eighth of the next power of two, steps being at least `least`."""
    whole = bucket(size, 16)
    step = min(whole, max(least, whole // 8))
    return -(-size // step) * step
