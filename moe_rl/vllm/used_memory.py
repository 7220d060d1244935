"""Lends memory that has been written before, so that a copy does not wait for the kernel to clear new pages."""

from __future__ import annotations

import math
import weakref
from collections import deque

import numpy as np

_ALIGNED = 64
# Smaller arrays come from the allocator.
_SMALL = 1 << 15


class UsedMemory:
    """Lends parts of one block of memory as arrays. A part is returned once its array and all its views are gone.

    One thread borrows; any thread may drop an array.

    Args:
        size: bytes. The constructor writes all of them once.
    """

    def __init__(self, size: int):
        self._memory = bytearray(size)
        np.frombuffer(self._memory, np.uint8)[:] = 0  # touches every page
        self._lent: dict[int, int] = {}  # first byte -> end
        self._returned: deque[int] = deque()  # appended to by threads that drop arrays

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised array in the first gap that is large enough; in new memory if there is none or the
        array is small."""
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
        # Views of this array keep it alive. If the memory were an array, views would keep that array alive instead.
        part = np.frombuffer(self._memory, np.uint8, size, at)
        weakref.finalize(part, self._returned.append, at)
        return part.view(dtype).reshape(shape)
