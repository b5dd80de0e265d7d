"""The processes that train together under `torchrun` or `accelerate launch`; without either there is one."""

from __future__ import annotations

import torch
from accelerate import PartialState


def rank_and_world() -> tuple[int, int]:
    """This process' number, and how many there are."""
    state = _state()
    return state.process_index, state.num_processes


def wait_for_all() -> None:
    """Go on when every process has come here."""
    _state().wait_for_everyone()


def _state() -> PartialState:
    """Without a GPU it must be told that CPUs work together, or every process takes itself for the only one."""
    return PartialState(cpu=not torch.cuda.is_available())
