"""What every launch of a Triton kernel shares: the device it runs on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever its tensors lie on; on a CPU its interpreter needs none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
