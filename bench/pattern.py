"""Bytes that both sides can compute: a fixed random table, xor-ed with a key that changes every round.

Consecutive rounds have different keys, so every byte changes every round, and bytes left over from any of the last 254
rounds are found. Each piece of a tensor starts at its own place in the table, so bytes that land in the wrong place
are found too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PIECE_BYTES = 256 * 1024
_TABLE_BYTES = 4 * 1024 * 1024


class Pattern:
    """Fills and checks byte views. One per process; the buffers are made once, so a check allocates almost nothing."""

    def __init__(self) -> None:
        self._table: Bytes = np.random.default_rng(20240607).integers(0, 256, _TABLE_BYTES, dtype=np.uint8)
        self._scratch: Bytes = np.empty(PIECE_BYTES, dtype=np.uint8)

    @staticmethod
    def _key(round_number: int) -> np.uint8:
        return np.uint8(1 + round_number % 255)

    def _piece(self, tensor: int, piece: int, nbytes: int) -> Bytes:
        start = (tensor * 2654435761 + piece * 40503 * 65 + 7) % (_TABLE_BYTES - PIECE_BYTES)
        return self._table[start : start + nbytes]

    def fill(self, tensor: int, view: Bytes, round_number: int) -> None:
        key = self._key(round_number)
        for piece, start in enumerate(range(0, view.size, PIECE_BYTES)):
            out = view[start : start + PIECE_BYTES]
            np.bitwise_xor(self._piece(tensor, piece, out.size), key, out=out)

    def wrong_bytes(self, tensor: int, view: Bytes, round_number: int) -> int:
        """How many bytes of `view` are not what fill() wrote for this tensor and round."""
        key = self._key(round_number)
        wrong = 0
        for piece, start in enumerate(range(0, view.size, PIECE_BYTES)):
            got = view[start : start + PIECE_BYTES]
            want = self._scratch[: got.size]
            np.bitwise_xor(self._piece(tensor, piece, got.size), key, out=want)
            if not np.array_equal(got, want):
                wrong += int(np.count_nonzero(got != want))
        return wrong
