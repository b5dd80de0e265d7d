"""Tensors too large for one file of a trained drafter: cut by rows when they are written, joined when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def cut(tensors: Mapping[str, Tensor], limit: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name; one of more than `limit` bytes as `name.part0`, `name.part1`, ..."""
    for name, tensor in tensors.items():
        num_parts = -(-tensor.nbytes // limit)
        if num_parts <= 1:
            yield name, tensor.contiguous()
            continue
        for index, part in enumerate(tensor.chunk(num_parts)):
            yield f"{name}.part{index}", part.clone()


def joined(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `cut` was given."""
    tensors: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in parts.items():
        stem, mark, number = name.rpartition(".part")
        whole = not (mark and number.isdigit())
        tensors.setdefault(name if whole else stem, []).append((0 if whole else int(number), tensor))
    return {
        name: found[0][1] if len(found) == 1 else torch.cat([part for _, part in sorted(found, key=lambda f: f[0])])
        for name, found in tensors.items()
    }
