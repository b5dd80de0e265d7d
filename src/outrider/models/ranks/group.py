"""The processes that share a target under `torchrun`: what rank 0 tells the others, and sums in the order of ranks."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outrider.errors import RankError
from outrider.kernels.graph_pool import is_warming_up
from outrider.models.ranks import lines
from outrider.models.ranks.link import connect
from outrider.models.ranks.watch import Watch


class Ranks:
    """One process among `size` of them. Rank 0 decides everything; the others do what it orders.

    Attributes:
        rank, size: of this process, and how many there are. device: this rank's.
        note: what a user should know, such as why sums are slow.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.lock = threading.RLock()
        self.is_whole = True
        """Whether every order was carried out by all, so that the next one finds them listening."""
        self._dropped: deque[int] = deque()
        self._numbers = iter(range(1, sys.maxsize))
        store, address = dist.distributed_c10d._get_default_store(), os.environ["MASTER_ADDR"]
        store = dist.PrefixStore("outrider", store)
        self._watch = Watch(rank, size, lines.connect(rank, size, store, address, "watch"))
        self._orders = lines.Orders(lines.connect(rank, size, store, address, "orders"))
        self._told = b""  # whole numbers that came with the last order
        self._kept: list[bytes] | None = None  # orders of what is being captured
        self._exchange, self.note = connect(rank, size, device, self.agree)
        self._all(torch.zeros(1, 1, device=device))  # the library sets up what it needs for what is left to it

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def can_be_captured(self) -> bool:
        """Whether a graph may hold what ranks say to one another, orders that are told at each replay apart."""
        return self._exchange is not None

    @property
    def speaks(self) -> bool:
        """Whether an order is told at once: not where a graph is prepared or captured."""
        return self._kept is None and not is_warming_up()

    def number(self) -> int:
        """A number for something that every rank has a part of."""
        return next(self._numbers)

    def drop(self, number: int) -> None:
        """Nobody here refers to it any more; the others learn it with the next order."""
        self._dropped.append(number)

    @contextmanager
    def order(self, *words: Any, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
        """Tell all others what to do; within the block rank 0 does its own part of it.

        Where a graph is prepared nobody hears of it, and where one is captured it is kept for `repeating`.

        tensors: whole numbers of 32 bits on `device`, which the others receive by `take`.
        """
        parcel = _parcel(tensors) if tensors else None
        in_letter = parcel is not None and parcel.device.type == "cpu"
        letter = pickle.dumps((words, parcel.numpy().tobytes() if parcel is not None and in_letter else b""))
        if self._kept is not None and not is_warming_up():
            self._kept.append(letter)
        with self._ordering([letter]) if self.speaks else nullcontext():
            if parcel is not None and not in_letter and not is_warming_up():
                self._spread(parcel)
            yield

    @contextmanager
    def keeping(self) -> Iterator[list[bytes]]:
        """Within the block, in which a graph is captured, orders are kept: what `repeating` tells."""
        self._kept = []
        try:
            yield self._kept
        finally:
            self._kept = None

    @contextmanager
    def repeating(self, orders: Sequence[bytes]) -> Iterator[None]:
        """Tell all others these orders; within the block rank 0 replays its own part of them."""
        with self._ordering(orders):
            yield

    def hear(self) -> tuple[Any, ...]:
        """Wait for the next order of rank 0."""
        with self._met_by_all():
            dropped, letter = pickle.loads(self._orders.hear())
        words, self._told = pickle.loads(letter)
        return (dropped, *words)

    def take(self, sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """The tensors of an order, int32 of these shapes."""
        counts = [torch.Size(size).numel() for size in sizes]
        if self.device.type == "cpu":
            whole = torch.frombuffer(bytearray(self._told), dtype=torch.int32)
        else:
            whole = self._spread(sum(counts))
        return [part.view(size) for part, size in zip(whole.split(counts), sizes, strict=True)]

    def add(self, partial: Tensor, to: Tensor, out: Tensor | None = None) -> Tensor:
        """`to` and every rank's `partial`, added in the order of ranks: ((to + p_0) + p_1) + ... in float32.

        Every number is summed by itself in this one order, so a row's bits depend on no other row.

        partial, to: (T, H) float32; `out` may be `to`.
        """
        if self._carries(partial) and partial.is_contiguous() and to.is_contiguous():
            assert self._exchange is not None
            out = torch.empty_like(to) if out is None else out
            return self._exchange.add(partial, to, out)
        parts = self._all(partial)
        out = torch.add(to, parts[0], out=out)
        for part in parts[1:]:
            out += part
        return out

    def sum(self, partial: Tensor) -> Tensor:
        """Every rank's `partial`, added in the order of ranks in float32 and rounded once: same shape and type."""
        parts = self._all(partial)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(partial.dtype)

    def columns(self, part: Tensor, count: int | None = None, whole: int | None = None) -> Tensor:
        """Every rank's columns side by side: (..., C) of each -> (..., size * C).

        Of (M, C) float32, C may be less than the `count` of each, and the first `whole` of all are given (None: all).
        """
        count = part.shape[-1] if count is None else count
        whole = self.size * count if whole is None else whole
        if part.dim() == 2 and self._carries(part, count):
            assert self._exchange is not None
            return self._exchange.gather(part, count, whole)
        missing = count - part.shape[-1]
        joined = torch.cat(list(self._all(nn.functional.pad(part, (0, missing)) if missing else part)), dim=-1)
        return joined if joined.shape[-1] == whole else joined[..., :whole].contiguous()

    def agree(self, error: Exception | None) -> Exception | None:
        """None where no rank met an error; else, on every rank, its own one or what another one met."""
        said: list[str | None] = [None] * self.size
        with self._met_by_all():
            dist.all_gather_object(said, None if error is None else str(error))
        if error is not None:
            return error
        return next((RankError(f"rank {rank} of {self.size}: {what}") for rank, what in enumerate(said) if what), None)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        least = torch.tensor([number], dtype=torch.int64)
        with self._met_by_all():
            dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def end(self) -> None:
        """The job is over: let the others end, too."""
        if self.leads and not self._watch.is_over:
            if self.is_whole:
                with self.order("end"):
                    pass
            self._watch.part()
            dist.destroy_process_group()

    def fail(self, reason: str) -> None:
        """This rank cannot do what was ordered: the job ends."""
        self._watch.fail(reason)

    def part(self) -> None:
        """This rank was told that the job is over."""
        self._watch.is_over = True
        dist.destroy_process_group()

    @contextmanager
    def _ordering(self, letters: Sequence[bytes]) -> Iterator[None]:
        """Tell these orders; they are carried out when the block ends well."""
        with self.lock:
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))] if letters else []
            was_whole, self.is_whole = self.is_whole, False
            if not was_whole:
                raise RankError(
                    "an order was left unfinished, and the ranks no longer do the same: start the job again"
                )
            with self._met_by_all():
                for letter in letters:
                    self._orders.tell(pickle.dumps((dropped, letter)))
                    dropped = []
            yield
            self.is_whole = True

    def _carries(self, part: Tensor, count: int | None = None) -> bool:
        """Whether the direct way takes these numbers, so many of every row."""
        if self._exchange is None or is_warming_up() or part.element_size() != 4:
            return False
        return self._exchange.carries(part.numel() if count is None else part.shape[0] * count)

    def _spread(self, numbers: Tensor | int) -> Tensor:
        """Rank 0's whole numbers, from device to device; the others say how many."""
        count = numbers if isinstance(numbers, int) else numbers.numel()
        own = None if isinstance(numbers, int) else numbers
        if self._exchange is not None and self._exchange.carries(count):
            return self._exchange.spread(own, count)
        whole = torch.empty(count, dtype=torch.int32, device=self.device) if own is None else own
        with self._met_by_all():
            dist.broadcast(whole, 0)
        return whole

    def _all(self, part: Tensor) -> Tensor:
        """(size, *shape): every rank's; where a graph is being prepared, this rank's own in all places."""
        part = part.contiguous()
        if is_warming_up():  # ranks may prepare different graphs, and must not wait for one another over it
            return part.expand(self.size, *part.shape)
        with self._met_by_all():
            whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from PyTorch 2.13 on
            gather(whole, part)
        return whole.view(self.size, *part.shape)

    @contextmanager
    def _met_by_all(self) -> Iterator[None]:
        """Within the block all ranks must come together."""
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:  # PyTorch's own, and the system's, of a broken connection
            if self._watch.is_over:  # rank 0 has said all that there is to say
                raise SystemExit(1) from None
            self._watch.wait(error)


def _parcel(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(torch.int32) for tensor in tensors])
