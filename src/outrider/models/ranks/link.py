"""The direct way among ranks on GPUs of one host: memory of each that all others write to, lent by PyTorch's symmetric
memory. Multicast, which it could have as well, is never asked for.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.errors import RankError

if TYPE_CHECKING:
    from outrider.kernels.triton.exchange import Exchange

PATIENCE = 60
"""Seconds for the others to open their memory."""
TRIES = 5
"""Of a first exchange, after which it is held to have failed."""
Agree = Callable[[Exception | None], Exception | None]


def connect(rank: int, size: int, device: torch.device, agree: Agree) -> tuple[Exchange | None, str | None]:
    """The exchange of these ranks, or None and why there is none; all of them call this together.

    agree: see `Ranks.agree`.
    """
    if device.type != "cuda":
        return None, None
    steps: tuple[Callable[[Any], Any], ...] = (
        lambda _: _refuse(rank, size, device),
        lambda _: _own(size, device),
        lambda own: _opened(rank, size, own),
        lambda opened: _compiled(rank, *opened),
        _tried,
    )
    made: Any = None
    for step in steps:  # whatever one rank lacks, all learn it before anybody waits for it
        error: Exception | None = None
        try:
            made = step(made)
        except Exception as caught:  # of PyTorch, a compiler or a driver: each raises its own
            error = caught
        if (error := agree(error)) is not None:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return None, f"ranks add up by way of a library, slower: {reason}"
    return made, None


def _refuse(rank: int, size: int, device: torch.device) -> None:
    """What can be known beforehand: the way is for GPUs of one host that reach each other's memory."""
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, (socket.gethostname(), device.index))
    if len({host for host, _ in hosts}) > 1:
        raise RankError("they are on several hosts")
    for _, other in hosts:
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            raise RankError(f"GPU {device.index} does not reach the memory of GPU {other}")


def _own(size: int, device: torch.device) -> Tensor:
    """This rank's inbox, of zeros."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")  # an allocation of its own, which begins where it lies
    import torch.distributed._symmetric_memory as symmetric  # no public name yet (2.13)

    from outrider.kernels.triton.exchange import ROOM

    with suppress(RuntimeError):  # it was chosen before
        symmetric.set_backend("CUDA")
    inbox = symmetric.empty((2, size, ROOM), dtype=torch.int64, device=device)
    inbox.zero_()
    torch.cuda.synchronize(device)
    return inbox


def _opened(rank: int, size: int, own: Tensor) -> tuple[tuple[Tensor, ...], object]:
    """Everybody's inbox, as this rank's device sees it, and what keeps them open."""
    import torch.distributed._symmetric_memory as symmetric

    store: Any = dist.distributed_c10d._get_default_store()
    patience = store.timeout
    store.set_timeout(timedelta(seconds=PATIENCE))  # a rank that fails here would leave the others waiting
    try:
        handle = symmetric.rendezvous(own, dist.distributed_c10d._get_default_group())
    finally:
        store.set_timeout(patience)
    inboxes = [handle.get_buffer(peer, own.shape, own.dtype) for peer in range(size)]
    if inboxes[rank].data_ptr() != own.data_ptr():
        raise RankError("symmetric memory lies elsewhere than PyTorch says")
    inboxes[rank] = own
    return tuple(inboxes), handle


def _compiled(rank: int, inboxes: tuple[Tensor, ...], handle: object) -> Exchange:
    """The exchange, whose kernels have run once without waiting: none is to wait later while another is compiled."""
    from outrider.kernels.triton.exchange import Exchange
    from outrider.kernels.triton.launch import can_overlap

    exchange = Exchange(rank, inboxes, can_overlap(inboxes[rank].device), tries=0, keeps=handle)
    _exchanged(exchange, len(inboxes), 1)
    torch.cuda.synchronize(inboxes[rank].device)
    return exchange


def _tried(exchange: Exchange) -> Exchange:
    """The same, once every kind of exchange has given what it should, in bounded time; both halves of inboxes serve."""
    exchange.tries = TRIES
    right = [_exchanged(exchange, exchange.ranks, turn) for turn in (1, 2, 3)]
    torch.cuda.synchronize(exchange.device)
    if not all(right):
        raise RankError("what was sent from GPU to GPU did not come")
    exchange.wait_forever()
    return exchange


def _exchanged(exchange: Exchange, size: int, turn: int) -> bool:
    """Whether one of each kind gives what it should."""
    rank, count = exchange.rank, 1000 * turn
    numbers = torch.arange(count, dtype=torch.float32, device=exchange.device).view(1, count)
    summed = exchange.add(numbers * (rank + 1), numbers, torch.empty_like(numbers))
    sides = exchange.gather(numbers + rank, count, size * count)
    told = exchange.spread(numbers.int() if rank == 0 else None, count)
    expected = torch.cat([numbers + peer for peer in range(size)], dim=1)
    found = summed == numbers * (1 + size * (size + 1) // 2), sides == expected, told == numbers.int()
    return all(bool(same.all()) for same in found)
