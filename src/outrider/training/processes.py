"""The processes that train together under `torchrun` or `accelerate launch`; without either there is one."""

from __future__ import annotations

from accelerate import PartialState


def rank_and_world() -> tuple[int, int]:
    """This process' number, and how many there are."""
    state = PartialState()
    return state.process_index, state.num_processes


def wait_for_all() -> None:
    """Go on when every process has come here."""
    PartialState().wait_for_everyone()
