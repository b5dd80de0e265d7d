"""How the processes that `torchrun` started find one another: once, with a device each."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from outrider.errors import ConfigError, RankError
from outrider.models.ranks.group import Ranks

_PATIENT = 365
"""Days: a rank may wait for its next order as long as nobody asks anything; who is lost is found out by `Watch`."""


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
