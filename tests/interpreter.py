"""Triton's interpreter made to round as a GPU does (its own casts cut the digits off), and to count by a tensor."""

from __future__ import annotations

import numpy as np
import torch


def round_as_a_gpu_does() -> None:
    """Casts from float32 to bfloat16 go to the nearest, ties to even; calling it again changes nothing."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    if getattr(original, "rounds", False):
        return

    def convert(values, source, target, rounding_mode):
        if source != tl.float32 or target != tl.bfloat16:
            return original(values, source, target, rounding_mode)
        floats = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return floats.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(values.shape)

    convert.rounds = True
    interpreter._convert_float = convert
    patch = interpreter._patch_lang_tensor

    def patch_and_count(tensor, scope):
        """A loop's bound is an array of one number there, which NumPy 2.4 takes for no number any more."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_count
