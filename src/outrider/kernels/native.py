"""The native CPU kernels: every verb is one operation of cpu/kernels.cpp, run at once or recorded into a program."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.errors import KernelError
from outrider.kernels.base import KeyIndex
from outrider.kernels.build import build
from outrider.kernels.graph_pool import SharesGraphs
from outrider.kernels.large_pages import LargePages
from outrider.kernels.packing import GROUP, pack_floats, pack_q4, pack_q8, pack_rows
from outrider.kernels.program import Batch, NativeProgram, Op, make_batch, run
from outrider.kernels.tree import PlainTreeVerbs

_LINEAR, _LOOKUP, _RMS_NORM, _GATED, _ROTATE, _ATTENTION, _DRAW, _NOISE, _RANK = range(9)
_KINDS = {"float32": 0, "bfloat16": 1, "q4": 2, "q8": 3}
_LARGEST_HEAD = 1024
_MOST_RANKED = 32


class NativeLinear:
    """Weights in the native order (kernels/packing.py)."""

    input_dtype = torch.float32

    def __init__(
        self, kernels: NativeKernels, kind: str, packed: Tensor, shape: tuple[int, int], bias: Tensor | None
    ) -> None:
        self.kind = kind
        self.out_features, self.in_features = shape
        self.nbytes = packed.nbytes + (0 if bias is None else bias.nbytes)
        self._kernels = kernels
        # Floats are made of a module's, whose memory they take over one by one: elsewhere both would be there at once.
        self._packed = kernels.memory.keep(packed) if kind in ("q4", "q8") else packed
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x: (T, K) float32 -> (T, N) float32; `residual` (T, N) is added last and may be `out` itself."""
        if out is None:
            out = x.new_empty(x.shape[0], self.out_features)
        assert x.shape[1] == self.in_features
        assert out.shape[1] == self.out_features
        sizes = (self.in_features, self.out_features, _stride(x), 0 if residual is None else _stride(residual))
        self._kernels._emit(
            _LINEAR,
            x.shape[0],
            (x, self._packed, self._bias, residual, out),
            (_KINDS[self.kind], *sizes, _stride(out)),
        )
        return out

    def draw(
        self,
        x: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        samples: Tensor,
        positions: Tensor,
        vocab_size: int | None = None,
    ) -> Tensor:
        """See `Linear.draw`."""
        logits = self(x)
        return self._kernels.draw(logits[:, :vocab_size], temperature, seeds, samples, positions)

    def lookup(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """tokens: (T,) int64 in [0, N) -> rows of w, dequantised exactly: (T, K) float32."""
        if out is None:
            out = torch.empty(tokens.shape[0], self.in_features)
        sizes = (_KINDS[self.kind], self.in_features, self.out_features, _stride(out))
        batch = make_batch(tokens.shape[0], tokens) if self._kernels._program is None else None
        self._kernels._emit(_LOOKUP, tokens.shape[0], (self._packed, out), sizes, batch=batch)
        return out

    def rows(self, ids: Tensor) -> NativeLinear:
        """A linear of the outputs `ids` (n,) int64 alone, with the very bits of their weights."""
        packed = pack_rows(self.kind, self._packed, self.in_features, ids)
        bias = None if self._bias is None else self._bias[ids]
        return NativeLinear(self._kernels, self.kind, packed, (ids.shape[0], self.in_features), bias)


class NativeKernels(PlainTreeVerbs, SharesGraphs):
    """Kernels compiled for this CPU; a row's arithmetic is one fixed sequence whatever shares the call."""

    name = "native"
    fixed_width: int | None = None
    note: str | None = None
    wide: tuple[int, ...] = ()

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self.path: str = library.outrider_path().decode()
        """Instruction set: "avx512", "avx2" or "portable"."""
        self.memory = LargePages()
        self._library = library
        self._program: NativeProgram | None = None

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """(N, K) float32 or bfloat16 -> Linear of the same kind."""
        kind = str(weight.dtype).removeprefix("torch.")
        if kind not in ("float32", "bfloat16"):
            raise KernelError(f"weights of {weight.dtype} have no kernel: convert them to float32 or bfloat16")
        return NativeLinear(self, kind, pack_floats(weight), (weight.shape[0], weight.shape[1]), _floats(bias))

    def pack_quantised(
        self, kind: str, quants: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None = None
    ) -> NativeLinear:
        """See `Kernels.pack_quantised`.

        Raises:
            KernelError: if K is no multiple of 32, a scale or minimum is no half-precision number, or for "int8".
        """
        if kind == "int8":
            raise KernelError("int8 weights are multiplied on a GPU: choose dtype packed or bfloat16 on a CPU")
        if quants.shape[1] % GROUP:
            raise KernelError(f"quantised rows of {quants.shape[1]} are not whole groups of 32: choose dtype float32")
        if kind == "q4":
            assert minima is not None
            packed = pack_q4(quants, scales, minima)
        else:
            packed = pack_q8(quants, scales)
        return NativeLinear(self, kind, packed, (quants.shape[0], quants.shape[1]), _floats(bias))

    @contextmanager
    def record(self) -> Iterator[NativeProgram]:
        """Within the block verbs are noted, not run; see `Kernels.record`."""
        assert self._program is None
        self._program = NativeProgram(self._library, self.threads)
        try:
            yield self._program
        finally:
            self._program = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x: (T, H) float32, weight: (H,) float32 -> (T, H) float32."""
        out = torch.empty_like(x) if out is None else out
        self._emit(_RMS_NORM, x.shape[0], (x, weight, out), (x.shape[1], _stride(x), _stride(out)), (eps,))
        return out

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """gate_up: (T, 2 * I) float32, gate first -> silu(gate) * up: (T, I) float32."""
        return self._gated(gate_up, out, 0)

    def gelu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """As `silu_mul`, with gelu in its tanh form."""
        return self._gated(gate_up, out, 1)

    def _gated(self, gate_up: Tensor, out: Tensor | None, gelu: int) -> Tensor:
        size = gate_up.shape[1] // 2
        out = gate_up.new_empty(gate_up.shape[0], size) if out is None else out
        self._emit(_GATED, gate_up.shape[0], (gate_up, out), (size, _stride(gate_up), _stride(out), gelu))
        return out

    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels.rotate_and_write`."""
        _, kv_heads, dim = k_pages.shape
        assert dim <= _LARGEST_HEAD
        assert qkv.shape[1] == (num_heads + 2 * kv_heads) * dim
        assert k_pages.is_contiguous()
        assert v_pages.is_contiguous()
        out = qkv.new_empty(qkv.shape[0], num_heads, dim) if out is None else out
        sizes = (num_heads, kv_heads, dim, cos.shape[1], _is_half(k_pages), _stride(qkv), num_heads * dim)
        self._emit(
            _ROTATE,
            qkv.shape[0],
            (qkv, cos, sin, k_pages, v_pages, out, q_norm, k_norm),
            sizes,
            (eps,),
            None if self._program else make_batch(qkv.shape[0], None, positions, slots),
        )
        return out

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        keys: KeyIndex,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        skip_first: bool = False,
    ) -> Tensor:
        """See `Kernels.attention`; softmax in float32 over blocks of 256 positions, merged in order."""
        rows, num_heads, dim = q.shape
        assert q.is_contiguous()
        out = torch.empty_like(q) if out is None else out
        heads, width = (num_heads, k_pages.shape[1], dim), num_heads * dim
        self._emit(
            _ATTENTION,
            rows,
            (q, k_pages, v_pages, sinks, out),
            (*heads, _is_half(k_pages), window or 0, width, width, skip_first),
            (scale, softcap or 0.0),
            None if self._program else make_batch(rows, keys=keys),
        )
        return out

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """See `Kernels.draw`."""
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        operands = (logits, temperature.contiguous(), seeds.contiguous(), samples.contiguous(), positions.contiguous())
        self._emit(_DRAW, logits.shape[0], (*operands, out), (logits.shape[1], _stride(logits)))
        return out

    def rank(
        self,
        logits: Tensor,
        count: int,
        temperature: Tensor,
        seeds: Tensor,
        samples: Tensor,
        positions: Tensor,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels.rank`."""
        rows, columns = logits.shape
        count = min(count, columns, _MOST_RANKED)
        numbers = torch.empty(rows * (count + 1), dtype=torch.float64)
        found = torch.empty(rows, count, dtype=torch.int64)
        operands = (logits, temperature, seeds, samples, positions, ids, numbers, found)
        assert all(t is None or t.is_contiguous() for t in operands[1:])
        self._emit(_RANK, rows, operands, (columns, _stride(logits), count))
        return numbers[: rows * count].view(rows, count), found, numbers[rows * count :]

    def gumbel(self, seeds: Tensor, samples: Tensor, positions: Tensor, vocab_size: int, stream: int = 0) -> Tensor:
        """The noise of `draw` on its own, as `kernels.noise.gumbel` defines it: (T, V) float64."""
        out = torch.empty(seeds.shape[0], vocab_size, dtype=torch.float64)
        self._emit(_NOISE, seeds.shape[0], (seeds, samples, positions, out), (vocab_size, stream))
        return out

    def _emit(
        self,
        code: int,
        rows: int,
        operands: tuple[Tensor | None, ...],
        sizes: tuple[int, ...],
        numbers: tuple[float, ...] = (),
        batch: Batch | None = None,
    ) -> None:
        op = Op(code, sizes, numbers, tuple([None if t is None else t.data_ptr() for t in operands]))
        if self._program is not None:
            self._program.add(op, [t for t in operands if t is not None])
            return
        batch = Batch(rows) if batch is None else batch
        run(self._library, ctypes.byref(op), 1, batch, self.threads)


def load_native(threads: int | None = None, target: tuple[str, ...] = ("-march=native",)) -> NativeKernels:
    """Compile (once) and load the kernels.

    threads: None takes as many as the process may use, and no more than PyTorch does.

    Raises:
        KernelError: if they cannot be compiled or loaded here.
    """
    try:
        # PyTorch's libgomp is in the process already and answers to the same name, so both share one pool of threads.
        library = ctypes.CDLL(str(build(target)))
    except OSError as error:
        raise KernelError(f"the native kernels cannot be loaded ({error}): choose kernels='plain'") from error
    library.outrider_run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
    library.outrider_path.restype = ctypes.c_char_p
    return NativeKernels(library, threads or _default_threads())


def _default_threads() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(available, torch.get_num_threads()))


def _stride(x: Tensor) -> int:
    assert x.dtype == torch.float32
    assert x.stride(-1) == 1
    return x.stride(0)


def _is_half(pages: Tensor) -> int:
    assert pages.dtype in (torch.float32, torch.bfloat16)
    return int(pages.dtype == torch.bfloat16)


def _floats(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()
