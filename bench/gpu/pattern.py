"""Bytes that every rank can compute, on the CPU and on a device: a random table, xor-ed with a key of the round.

The rules are those of bench/pattern.py (every byte changes every round; bytes in the wrong place are found), in torch
instead of NumPy and with longer pieces, so that a model of 60 GB is filled and compared by few kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_MULTIPLIERS = (2654435761, 40503 * 65)


class Pattern:
    """Fills and checks flat uint8 tensors on one device. The table is the same in every process."""

    def __init__(self, device: str, table_bytes: int) -> None:
        generator = torch.Generator().manual_seed(20240607)
        table = torch.randint(0, 256, (table_bytes,), dtype=torch.uint8, generator=generator)
        self.piece_bytes = table_bytes // 2
        self._table = table.to(device)

    def _pieces(self, tensor: int, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(piece of the tensor, piece of the table)."""
        room = self._table.numel() - self.piece_bytes
        for number, start in enumerate(range(0, flat.numel(), self.piece_bytes)):
            piece = flat[start : start + self.piece_bytes]
            at = (tensor * _MULTIPLIERS[0] + number * _MULTIPLIERS[1] + 7) % room
            yield piece, self._table[at : at + piece.numel()]

    @staticmethod
    def _key(round_number: int) -> int:
        return 1 + round_number % 255

    def fill(self, flats: Sequence[torch.Tensor], round_number: int) -> None:
        for i, flat in enumerate(flats):
            for piece, table in self._pieces(i, flat):
                torch.bitwise_xor(table, self._key(round_number), out=piece)

    def wrong_bytes(self, flats: Sequence[torch.Tensor], round_number: int) -> int:
        """How many bytes are not what fill() wrote; the counts are added up on the device, and waited for once."""
        wrong = torch.zeros((), dtype=torch.int64, device=self._table.device)
        for i, flat in enumerate(flats):
            for piece, table in self._pieces(i, flat):
                wrong += torch.count_nonzero(piece != torch.bitwise_xor(table, self._key(round_number)))
        return int(wrong.item())
