"""Numbers exchanged among the GPUs of one host, in Triton: each writes into the others' memory and reads its own.

A word is a number of 32 bits beside the count of its exchange, written by one store of 64 bits: whoever finds the right
count has the number, and there is no other signal to wait for (the low-latency protocol of NCCL). Program `p` of every
GPU exchanges with program `p` of the others alone, and counts its own exchanges in its GPU's memory, so that all of it
can be captured in a graph.

An inbox holds two exchanges of every sender, in turns. A sender that writes its exchange `n` has ended its `n - 1`, for
which it waited for words that the receiver sent only after its own `n - 2` had ended: what is written over was read.
This needs all GPUs to run the same exchanges, of the same sizes, in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.launch import begin, launch_options, on_device

BLOCK = 512
"""Numbers of a program."""
WARPS = 4
PROGRAMS = 1024
"""Most of a launch: fewer than run at once on any card that joins by NVLink, and they start in their order anyway."""
ROOM = BLOCK * PROGRAMS
"""Numbers of one exchange."""
LOOKS = 1 << 20
"""At a word that is not there yet: one try, which is about a second."""
ENDLESS = (1 << 31) - 1
"""Tries of whoever waits as long as it takes."""

MOST_LAUNCHES = 16
"""Of one sum or one gathering: more are left to a library."""

_NUMBERS = ["first", "size", "own", "part", "whole", "tries"]
_ARRAYS = ["values", "to", "out"]


class Exchange:
    """This rank's side of all exchanges; every rank runs the same ones in one order.

    Attributes:
        counts: (PROGRAMS,) int32, of exchanges until now. tries: see `add_parts`.
    """

    def __init__(
        self, rank: int, inboxes: tuple[Tensor, ...], overlap: bool, tries: int = ENDLESS, keeps: object = None
    ) -> None:
        """inboxes: of every rank, (2, ranks, ROOM) int64, all zero before anybody's first exchange. keeps: lives as
        long as this, since the memory of others would go with it.
        """
        self.rank, self.ranks = rank, len(inboxes)
        self.device = inboxes[rank].device
        self.tries = tries
        self.counts = torch.zeros(PROGRAMS, dtype=torch.int32, device=self.device)
        self._inboxes = inboxes
        self._keeps = keeps
        self._options: dict[str, Any] = {
            "RANK": rank,
            "RANKS": len(inboxes),
            "BLOCK": BLOCK,
            "ROOM": ROOM,
            "LOOKS": LOOKS,
            "IS_PLAIN": self.device.type == "cpu",
            "OVERLAP": overlap,
            "num_warps": WARPS,
            **launch_options(overlap),
        }

    def wait_forever(self) -> None:
        """From now on nothing goes on without the others."""
        self.tries = ENDLESS

    def carries(self, count: int) -> bool:
        """Whether so many numbers of each rank had better be exchanged here."""
        return 0 < count <= MOST_LAUNCHES * ROOM

    def add(self, partial: Tensor, to: Tensor, out: Tensor) -> Tensor:
        """((to + p_0) + p_1) + ... in float32, where p_r is rank r's `partial`: contiguous, of one shape."""
        values, start, result = partial.view(-1), to.view(-1), out.view(-1)
        with on_device(self.device):
            for first, size in _stretches(values.numel()):
                given = (each[first : first + size] for each in (values, start, result))
                add_parts[_grid(size)](*given, self.counts, self._inboxes, size, self.tries, **self._options)
        return out

    def gather(self, values: Tensor, part: int, whole: int) -> Tensor:
        """Every rank's columns side by side, `part` of each, the first `whole` of all: (T, own) -> (T, whole).

        values: of 32 bits, own <= part; columns that a rank has not are nobody's.
        """
        values = values.contiguous()
        out = torch.empty(values.shape[0], whole, dtype=values.dtype, device=values.device)
        self._gather(values, values.shape[1], part, out)
        return out

    def spread(self, numbers: Tensor | None, count: int) -> Tensor:
        """Rank 0's `count` numbers, int32, on every rank; the others give None."""
        out = torch.empty(1, count, dtype=torch.int32, device=self.device)
        self._gather(out if numbers is None else numbers, 0 if numbers is None else count, count, out)
        return out[0]

    def _gather(self, values: Tensor, own: int, part: int, out: Tensor) -> None:
        bits, whole = out.view(torch.int32), out.shape[1]
        with on_device(self.device):
            for first, size in _stretches(out.shape[0] * part):
                given = values.view(torch.int32), bits, self.counts, self._inboxes, first, size, own, part, whole
                gather_parts[_grid(size)](*given, self.tries, **self._options)


def _stretches(count: int) -> Iterator[tuple[int, int]]:
    """Where each launch begins, and how many numbers it takes."""
    return ((first, min(ROOM, count - first)) for first in range(0, count, ROOM))


def _grid(size: int) -> tuple[int]:
    return (triton.cdiv(size, BLOCK),)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def add_parts(
    values,
    to,
    out,
    counts,
    inboxes,
    size,
    tries,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    LOOKS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = ((to + p_0) + p_1) + ...: `size` float32 numbers, `values` being this rank's.

    counts: (PROGRAMS,) int32, of exchanges until now. inboxes: of every rank, (2, RANKS, ROOM) int64 each.
    tries: after so many times LOOKS looks at a word that is not there yet the result is wrong. IS_PLAIN: this is the
    interpreter.
    """
    begin(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    number = tl.load(values + at, mask=inside, other=0.0)
    count = _send(number.to(tl.int32, bitcast=True), at, counts, inboxes, RANK, RANKS, ROOM, IS_PLAIN)
    total = tl.load(to + at, mask=inside, other=0.0)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += number
        else:
            bits = _receive(inboxes[RANK], rank, at, count, tries, RANKS, ROOM, LOOKS)
            total += bits.to(tl.float32, bitcast=True)
    tl.store(out + at, total, mask=inside)
    tl.store(counts + tl.program_id(0), count)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def gather_parts(
    values,
    out,
    counts,
    inboxes,
    first,
    size,
    own,
    part,
    whole,
    tries,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    LOOKS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Every rank's columns side by side: `size` numbers, int32, of the (T, part) that each rank has, from number
    `first` on, into out (T, whole).

    values: (T, own) are this rank's, own <= part; columns that it has not, and those behind the last of `whole`, are
    nobody's. The other arguments as `add_parts` takes them.
    """
    begin(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row, column = ((first + at) // part).to(tl.int64), (first + at) % part
    bits = tl.load(values + row * own + column, mask=inside & (column < own), other=0)
    count = _send(bits, at, counts, inboxes, RANK, RANKS, ROOM, IS_PLAIN)
    for rank in tl.static_range(RANKS):
        said = bits
        if rank != RANK:
            said = _receive(inboxes[RANK], rank, at, count, tries, RANKS, ROOM, LOOKS)
        place = rank * part + column
        tl.store(out + row * whole + place, said, mask=inside & (place < whole))
    tl.store(counts + tl.program_id(0), count)


@triton.jit
def _send(
    bits, at, counts, inboxes, RANK: tl.constexpr, RANKS: tl.constexpr, ROOM: tl.constexpr, IS_PLAIN: tl.constexpr
):
    """This program's words to all other ranks -> the count of this exchange. Nobody's numbers are sent as well."""
    count = tl.load(counts + tl.program_id(0), volatile=True) + 1
    words = (bits.to(tl.int64) << 32) | (count.to(tl.int64) & 0xFFFFFFFF)
    place = ((count & 1) * RANKS + RANK) * ROOM + at
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            if IS_PLAIN:
                tl.store(inboxes[rank] + place, words)
            else:
                _write(inboxes[rank] + place, words)
    return count


@triton.jit
def _receive(inbox, rank, at, count, tries, RANKS: tl.constexpr, ROOM: tl.constexpr, LOOKS: tl.constexpr):
    """What a rank sent to this program, once all of it is there: (BLOCK,) int32."""
    words_at = inbox + ((count & 1) * RANKS + rank) * ROOM + at
    words = tl.load(words_at, volatile=True)
    most = tries.to(tl.int64) * LOOKS
    looks = most * 0
    while (tl.max((words.to(tl.int32) != count).to(tl.int32), axis=0) > 0) & (looks < most):
        words = tl.load(words_at, volatile=True)
        looks += 1
    return (words >> 32).to(tl.int32)


@triton.jit
def _write(words_at, words):
    """Each word by one store, which other GPUs see at once and whole."""
    tl.inline_asm_elementwise(
        "st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;",
        "=r,l,l",
        [words_at.to(tl.int64), words],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
