"""The processes that share a target under `torchrun`: what rank 0 tells the others, and sums in the order of ranks."""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import shlex
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.errors import ConfigError, RankError
from outrider.kernels.graph_pool import is_warming_up
from outrider.models.ranks.watch import Watch

_PATIENT = 365
"""Days: a rank may wait for its next order as long as nobody asks anything; who is lost is found out by `Watch`."""
_LETTER = 4096
"""Bytes of an order that needs no second message."""


class Ranks:
    """One process among `size` of them. Rank 0 decides everything; the others do what it orders.

    Attributes:
        rank, size: of this process, and how many there are. device: this rank's.
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
        store = dist.distributed_c10d._get_default_store()
        self._watch = Watch(rank, size, dist.PrefixStore("outrider", store), os.environ["MASTER_ADDR"])
        self.add(torch.zeros(1, 1, device=device), torch.zeros(1, 1, device=device))  # libraries set up what they need

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def number(self) -> int:
        """A number for something that every rank has a part of."""
        return next(self._numbers)

    def drop(self, number: int) -> None:
        """Nobody here refers to it any more; the others learn it with the next order."""
        self._dropped.append(number)

    @contextmanager
    def order(self, *words: Any, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
        """Tell all others what to do; within the block rank 0 does its own part of it.

        tensors: whole numbers of 32 bits on `device`, which the others receive by `take`.
        """
        with self.lock:
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            was_whole, self.is_whole = self.is_whole, False
            if not was_whole:
                raise RankError(
                    "an order was left unfinished, and the ranks no longer do the same: start the job again"
                )
            with self._met_by_all():
                self._tell((dropped, *words))
                if tensors:
                    dist.broadcast(_parcel(tensors), 0)
            yield
            self.is_whole = True

    def hear(self) -> tuple[Any, ...]:
        """Wait for the next order of rank 0."""
        with self._met_by_all():
            letter = torch.empty(_LETTER, dtype=torch.uint8)
            dist.broadcast(letter, 0)
            size = int.from_bytes(letter[:8].numpy().tobytes(), "little")
            if size > _LETTER - 8:
                rest = torch.empty(size - (_LETTER - 8), dtype=torch.uint8)
                dist.broadcast(rest, 0)
                letter = torch.cat((letter, rest))
        words: tuple[Any, ...] = pickle.loads(letter[8 : 8 + size].numpy().tobytes())
        return words

    def take(self, sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """The tensors of an order, int32 of these shapes."""
        counts = [torch.Size(size).numel() for size in sizes]
        with self._met_by_all():
            whole = torch.empty(sum(counts), dtype=torch.int32, device=self.device)
            dist.broadcast(whole, 0)
        return [part.view(size) for part, size in zip(whole.split(counts), sizes, strict=True)]

    def add(self, partial: Tensor, to: Tensor, out: Tensor | None = None) -> Tensor:
        """`to` and every rank's `partial`, added in the order of ranks: ((to + p_0) + p_1) + ... in float32.

        Every number is summed by itself in this one order, so a row's bits depend on no other row.

        partial, to: (T, H) float32; `out` may be `to`.
        """
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

    def columns(self, part: Tensor) -> Tensor:
        """Every rank's columns side by side: (..., C) of each -> (..., size * C)."""
        return torch.cat(list(self._all(part)), dim=-1)

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

    def _tell(self, words: tuple[Any, ...]) -> None:
        letter = pickle.dumps(words)
        head, rest = letter[: _LETTER - 8], letter[_LETTER - 8 :]
        padded = len(letter).to_bytes(8, "little") + head.ljust(_LETTER - 8, b"\0")
        dist.broadcast(torch.frombuffer(bytearray(padded), dtype=torch.uint8), 0)
        if rest:
            dist.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0)

    @contextmanager
    def _met_by_all(self) -> Iterator[None]:
        """Within the block all ranks must come together."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # PyTorch's own errors of a broken connection
            if self._watch.is_over:  # rank 0 has said all that there is to say
                raise SystemExit(1) from None
            self._watch.wait(error)


def meet(size: int, device: str) -> Ranks:
    """This process among the `size` that `torchrun` started; they meet once, whoever asks again.

    Args:
        device: "cpu", or "cuda" and "auto" for the GPU of this process' number on its machine.

    Raises:
        ConfigError: if `torchrun` did not start so many, or the device is one for all. RankError: if they do not meet.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device!r} is one for all ranks: give cpu, or cuda for a GPU each")
    if dist.is_initialized() and dist.get_world_size() != size:
        met = dist.get_world_size()
        raise ConfigError(f"tensor_parallel={size} and {met} processes have met: give one number for all")
    _check(size)
    return _met(size, _device(device, int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))))


@functools.cache
def _met(size: int, place: torch.device) -> Ranks:
    """As PyTorch's default group, which it stands for: there is one a process."""
    if place.type == "cuda":
        torch.cuda.set_device(place)
    try:
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(days=_PATIENT))
        ranks = Ranks(int(os.environ["RANK"]), size, place)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"the {size} ranks of tensor_parallel={size} do not meet ({error})") from error
    atexit.register(ranks.end)
    return ranks


def _check(size: int) -> None:
    started = os.environ.get("WORLD_SIZE")
    if started is None or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise ConfigError(f"tensor_parallel={size} needs {size} processes: run `{_command(size)}`")
    if int(started) != size:
        raise ConfigError(f"tensor_parallel={size} and torchrun started {started} processes: give both one number")


def _command(size: int) -> str:
    """What this process should have been started by."""
    program, words = Path(sys.argv[0]), sys.argv[1:]
    ours = program.name == "outrider" or program.parent.name == "outrider"
    what = ["-m", "outrider", *words] if ours else [str(program), *words]
    return shlex.join(["torchrun", "--nproc-per-node", str(size), *what])


def _device(device: str, local: int) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local} of this machine has no GPU of its own, {torch.cuda.device_count()} are visible: start fewer "
            "processes on it"
        )
    return torch.device("cuda", local)


def _parcel(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(torch.int32) for tensor in tensors])
