"""The verbs every kernel set speaks; each set (native CPU, plain PyTorch, Triton) is one implementation of them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, dtype

from outrider.kernels.graph_pool import GraphPool
from outrider.kernels.places import Placed, Relative, Standing
from outrider.kernels.sprouts import Fits, Frontier, Ranked, Sprouts
from outrider.kernels.tree import PageTable, Trees, Walks


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """Where each row of a flat batch finds its keys, in position order.

    Row `t` belongs to request `request[t]` and attends to `length[t]` keys, at positions `0 .. length[t] - 1`. The key
    at position `x` lies in slot `tables[request[t], x // block_size] * block_size + x % block_size` while
    `x < linear[t]`, and in slot `tails[t, x - linear[t]]` from there on (a tree node's own path, itself included).

    Attributes (all int32, contiguous, on the pass's device):
        tables: (R, B). request: (T,). linear: (T,). tails: (T, D), D >= 1. length: (T,).
    """

    tables: Tensor
    request: Tensor
    linear: Tensor
    tails: Tensor
    length: Tensor
    block_size: int


class Linear(Protocol):
    """Weights packed for one kernel set; `y = x @ w.T + bias`, accumulated in float32."""

    kind: str
    """"float32", "bfloat16", "q4" (32-groups, scale and minimum), "q8" (32-groups, scale) or "int8" (a scale for each
    output, inputs rounded to bfloat16)."""
    in_features: int
    out_features: int
    nbytes: int
    input_dtype: dtype
    """What inputs are rounded to before they are multiplied; given in it already, they yield the same bits sooner."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x: (T, K) float32, or `input_dtype` -> (T, N) float32; `residual` (T, N) is added last and may be `out`."""

    def draw(
        self,
        x: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        samples: Tensor,
        positions: Tensor,
        vocab_size: int | None = None,
    ) -> Tensor:
        """The keyed draw of an output head: bit for bit `Kernels.draw` of its first `vocab_size` outputs (None: all).

        For rows whose logits nobody wants, neither to warp them nor to tell of them: a set may never write them.

        x: (T, K) float32, or `input_dtype`; the others as `Kernels.draw` takes them -> (T,) int64.
        """

    def lookup(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """tokens: (T,) int64 -> rows of w, dequantised exactly: (T, K) float32. A tied embedding is this."""

    def rows(self, ids: Tensor) -> Linear:
        """A linear of the outputs `ids` (n,) int64 alone, with the very bits of their weights."""


@runtime_checkable
class GatedLinear(Protocol):
    """A linear that can gate its own result, sooner than a verb of its own would."""

    def gated(self, x: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
        """`silu_mul` ("silu") or `gelu_mul` ("gelu_tanh") of `linear(x)`: x (T, K) -> (T, N / 2)."""


class Program(Protocol):
    """Verbs recorded over fixed buffers, run as one call; how many rows they take is said at each run."""

    def __len__(self) -> int: ...

    def run(
        self, first: int, last: int, positions: Tensor, slots: Tensor, keys: KeyIndex, tokens: Tensor | None = None
    ) -> None:
        """Run verbs `[first, last)` over the first T rows of their buffers; arguments as the verbs take them.

        tokens: (T,) int64, where a lookup is among them.
        """


class Kernels(Protocol):
    """One family of kernels under the invariance contract.

    A row's result depends on that row alone: not on how many rows share the call, nor on where it stands.
    Where a set cannot promise that at every width, `fixed_width` names the one width at which it can.
    Every verb writes into `out` and returns it where one is given, rounded where that is bfloat16 (which only sets need
    to take whose linears have that `input_dtype`).
    """

    name: str
    fixed_width: int | None
    note: str | None
    """What a user should know, such as why slower kernels serve."""
    wide: tuple[int, ...]
    """Rows of calls that take another path than narrow ones do: widths at which bits are to be compared as well."""

    @property
    def graph_pool(self) -> GraphPool:
        """The memory of all CUDA graphs over these kernels."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """(N, K) float32 or bfloat16 -> Linear of the same kind."""

    def pack_quantised(
        self, kind: str, quants: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None = None
    ) -> Linear:
        """quants: (N, K) uint8 in 0..15 for "q4", int8 for "q8" and "int8"; scales, minima: (N, K // 32) float32, of
        "int8" scales (N,).

        "q4": w = scale * quant + minimum. "q8", "int8": w = scale * quant.

        Raises:
            KernelError: for a kind that this set does not multiply ("int8" on native kernels), or rows of "q4" and "q8"
                that are not whole groups.
        """

    def record(self) -> AbstractContextManager[Program] | None:
        """Record instead of run: within the block every verb only notes its operands, and needs `out`.

        None where a set has no such way and every verb runs at once.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x: (T, H) float32, weight: (H,) float32 -> (T, H) float32."""

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """gate_up: (T, 2 * I) float32, gate first -> silu(gate) * up: (T, I) float32."""

    def gelu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """As `silu_mul`, with gelu in its tanh form."""

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
        """Rotate q and k by halves (as Llama) and write k, v into their slots; a slot below 0 is not written.

        qkv: (T, (Hq + 2 * Hkv) * D) float32; cos, sin: (P, D_rot // 2) float32 by position (D_rot <= D; the rest of a
        head passes unrotated); positions, slots: (T,) int32; k_pages, v_pages: (S, Hkv, D) float32 or bfloat16
        -> q: (T, Hq, D) float32. q_norm, k_norm: (D,) float32, an RMS norm of every head before it is rotated (Qwen3).
        """

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
        """q: (T, Hq, D) float32, pages (S, Hkv, D) float32 or bfloat16 -> (T, Hq, D) float32.

        Where linears round their inputs to bfloat16, q and the softmax's weights are rounded likewise beside bfloat16
        pages, and q may be given so.
        A row at position p = length - 1 sees keys at positions > p - window. softcap c: c * tanh(s / c).
        sinks: (Hq,) float32 logits that take part in the softmax and carry no value. skip_first: the key at position 0
        is seen by position 0 alone.
        """

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """The keyed draw: argmax over v of `logits[t, v] / temperature[t] + gumbel(seed, sample, position, v)`.

        logits: (T, V) float32 (-inf where forbidden); temperature: (T,) float32, 0 draws the plain argmax; seeds: (T,)
        int64 (the bits of a uint64); samples, positions: (T,) int32 -> (T,) int64; ties go to the lowest id; -1 where a
        row holds a NaN or nothing but -inf.
        """

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
        """The `count` best columns of each row by the score that `draw` compares, best first, ties by column.

        logits: (T, C) float32; ids: (C,) int64 ascending, the token of each column, for its noise (None: the columns
        themselves); the others as `draw` takes them -> scores (T, K) float64; columns (T, K) int64, -1 where nothing
        is left but -inf, and in the whole row where it holds a NaN; log of the sum of e^logit of each row at
        temperature 0: (T,) float64. K <= `count`: no more than there are columns, and on a CPU no more than 32.
        """

    def gumbel(self, seeds: Tensor, samples: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        """The noise of `draw` on its own, by token id: (T, V) float64; arguments as `draw` takes them."""

    def place(self, standing: Standing, rows: Relative, vocab_size: int) -> Placed:
        """Where rows that are told from each request's last known token stand in a pass, and where their keys are."""

    def sprout(
        self, ranked: Ranked, above: Frontier, width: int, heat: Tensor, fits: Fits, kept: Tensor | None = None
    ) -> Sprouts:
        """The `width` likeliest children of every node of a frontier, weighed, and each request's best, ties by place.

        A child weighs its chance times its parent's weight: its own chance without noise, what `fits` say under it.
        heat: (R,) float32, temperatures. kept: (V_d,) int64, the tokens of the columns (None: the columns themselves).
        """

    def walk(self, draws: Tensor, trees: Trees) -> Walks:
        """The match rule for all requests at once: step down while a child carries the token drawn at its parent.

        draws: (M,) int64, what `draw` gave for every row of every tree, at the output position of its depth.
        """

    def compact(self, table: PageTable, slots: Tensor, trees: Trees, walks: Walks) -> None:
        """Move what accepted nodes wrote to the slots of the first nodes of their tree, in every layer.

        slots: (N,) int32, where each node's key and value were written; no two nodes of a pass share one.
        """
