"""Triton's interpreter made to round as a GPU does (its own casts cut the digits off), to count by a tensor, and to
waste less time."""

from __future__ import annotations

import functools
import inspect

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
    _patch_once_a_launch(interpreter, (tl, tl.core))
    _know_dtypes(interpreter, tl)


def _patch_once_a_launch(interpreter, languages) -> None:
    """Every call of a device function looks through the whole language for what is to be patched, which its launch has
    patched already: a quarter of all time."""
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @functools.cache
    def seen_by(function):
        modules = filter(inspect.ismodule, function.__globals__.values())
        return {module.__name__ for module in modules if module in languages}

    def patch_what_is_new(function):
        if seen_by(function) <= patched:
            return interpreter._LangPatchScope()
        patched.update(seen_by(function))
        return patch(function)

    def launch_anew(self, *arguments, **settings):
        patched.clear()  # the launch before has put back what it patched
        return launch(self, *arguments, **settings)

    interpreter._patch_lang = patch_what_is_new
    interpreter.GridExecutor.__call__ = launch_anew


def _know_dtypes(interpreter, tl) -> None:
    """NumPy's type of a scalar's stands in a table that is written anew whenever it is asked for."""
    of_scalar = functools.cache(interpreter._get_np_dtype)

    def of(kind):
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else of_scalar(kind)

    interpreter._get_np_dtype = of
