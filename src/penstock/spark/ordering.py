"""The order of whole numbers, by numpy."""

from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
# numpy sorts by digits, which takes a tenth of the time, if numbers have at most so many bits.
_DIGIT_BITS: Final = 16


def stable_order(numbers: Array) -> Array:
    """Where each number is when they are sorted; equal ones stay in their order."""
    if not len(numbers):
        return np.zeros(0, np.int64)
    left = numbers - numbers.min()
    order = np.argsort(left.astype(np.uint16), kind="stable")
    while (left := left >> _DIGIT_BITS).any():
        order = order[np.argsort(left[order].astype(np.uint16), kind="stable")]
    return order


def order_by(*keys: Array) -> Array:
    """Where each row is when rows are sorted by these numbers, the first of them first."""
    order = stable_order(keys[-1])
    for key in keys[-2::-1]:
        order = order[stable_order(key[order])]
    return order
