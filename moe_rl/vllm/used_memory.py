"""Lends memory that was written before, so that a copy does not wait for the kernel to find and clear new pages."""

from __future__ import annotations

import math
import weakref
from collections import deque

import numpy as np

_ALIGNED = 64
# What is smaller comes from memory that the allocator has at hand.
_SMALL = 1 << 15


class UsedMemory:
    """Lends parts of one piece of memory as arrays. A part comes back when its array and all views of it are gone.

    One thread borrows; any thread may drop an array.

    Args:
        size: bytes. All of them are written here once.
    """

    def __init__(self, size: int):
        self._memory = bytearray(size)
        np.frombuffer(self._memory, np.uint8)[:] = 0  # touches every page
        self._lent: dict[int, int] = {}  # first byte -> end
        self._returned: deque[int] = deque()  # appended to by threads that drop arrays

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with any content, in the first gap that is large enough; in new memory if there is none, or
        if the array is small."""
        size, at = math.prod(shape) * dtype.itemsize, 0
        if size < _SMALL:
            return np.empty(shape, dtype)
        while self._returned:
            del self._lent[self._returned.popleft()]
        room = -(-size // _ALIGNED) * _ALIGNED
        for first, end in sorted(self._lent.items()):
            if first - at >= room:
                break
            at = end
        if at + room > len(self._memory):
            return np.empty(shape, dtype)
        self._lent[at] = at + room
        # Views of this array keep it alive. If the memory were an array, NumPy would let them keep that one instead.
        part = np.frombuffer(self._memory, np.uint8, size, at)
        weakref.finalize(part, self._returned.append, at)
        return part.view(dtype).reshape(shape)
