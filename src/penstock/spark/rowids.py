"""Ids for rows without a key: the same row of the same task gets the same id in every attempt.

An id is a hash of the row's content, not its position: after a shuffle the rows of a task come in
another order when it is retried, and a position would then be that of another row. Equal rows are
numbered in the order in which they come.
"""

from hashlib import blake2b
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_KEY_CHARS: Final = 16


class RowIds:
    """The ids of a task's rows; `scope` identifies the task."""

    def __init__(self, scope: str) -> None:
        digest = blake2b(scope.encode(), digest_size=_KEY_CHARS).hexdigest()
        # 64 bits would be too few for a billion rows; two hashes make 128.
        self._keys = digest[:_KEY_CHARS], digest[_KEY_CHARS:]
        self._seen = SeenNumbers()

    def of(self, rows: Array) -> list[str]:
        """The ids of the next rows, each given as bytes."""
        # Planning a write imports this module, in a process of its own, and pandas takes longer.
        from pandas.util import hash_array

        first, second = (
            hash_array(rows, hash_key=key, categorize=False).astype(np.uint64) for key in self._keys
        )
        joined = np.stack([first, second], axis=1).tobytes().hex()
        width = 2 * _KEY_CHARS
        ids = [joined[at : at + width] for at in range(0, len(joined), width)]
        earlier = self._seen.count_and_add(first)
        for place in np.flatnonzero(earlier).tolist():
            ids[place] += f".{earlier[place]}"
        return ids


class SeenNumbers:
    """The numbers added so far, eight bytes each, in sorted runs that are merged as they grow."""

    def __init__(self) -> None:
        self._runs: list[Array] = []

    def count_and_add(self, numbers: Array) -> Array:
        """How often each number occurred before, in earlier calls or earlier in this array."""
        order = np.argsort(numbers, kind="stable")
        run = numbers[order]
        earlier = np.arange(len(run)) - np.searchsorted(run, run)
        for known in self._runs:
            earlier += np.searchsorted(known, run, "right") - np.searchsorted(known, run)
        self._runs.append(run)
        while len(self._runs) > 1 and len(self._runs[-2]) <= len(self._runs[-1]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]), kind="stable")]
        counts: Array = np.empty_like(earlier)
        counts[order] = earlier
        return counts
