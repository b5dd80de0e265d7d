"""Finds the fastest tiles of linears as layers run them, for those who write the table in `kernels/triton/linear`.

A pass over a few layers runs as one graph, so that each kernel begins while the one before it ends; one role's tile is
changed at a time, and kept where the whole pass is faster. Nothing here is called, and nothing kept, while serving.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.cache.pages import Pages
from outrider.errors import KernelError
from outrider.kernels import select
from outrider.kernels.base import Kernels
from outrider.measure.cycle import seconds_of
from outrider.measure.flight import replayed
from outrider.models.batch import BatchBuilder, FlatBatch
from outrider.models.lean import LeanModel

SHARED_MEMORY = 227 * 1024
"""Bytes that one program may hold on an H100 and an H200; it keeps one stage fewer than are on their way."""
OUTPUTS, INPUTS = (16, 32, 64, 128), (64, 128, 256, 512)
"""Of a tile."""
STEP = (8192, 32768)
"""Bytes of weights that a program asks for at a time: fewer leave memory idle, more leave programs no room."""
ON_THEIR_WAY = (32768, 65536, 131072)
"""Bytes of weights that a program has on their way, about."""
AHEAD = (0, 8192, 16384, 65536, 131072, 262144, 524288)
"""Bytes of weights that a program asks for before its inputs are there; those of `Tile` are tried first."""
KEPT = {1: 0, 2: 4, 4: 4, 8: 4, 16: 8, 32: 0, 64: 0}
"""How many of the best tiles of fewer rows are tried by so many rows, beside those of its own; 0: all candidates."""
CONTEXT, BLOCK = 1024, 16
REPEATS = 9


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of random weights: sizes of its config, and how many of its layers are measured."""

    sizes: Mapping[str, int]
    num_layers: int


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "8b": Shape(
            {
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128_256,
            },
            4,
        ),
        "1b": Shape(
            {
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128_256,
            },
            8,
        ),
        "135m": Shape(
            {
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "vocab_size": 49_152,
            },
            30,
        ),
    }
)
"""All weights of the measured layers together are more than any cache holds."""


@dataclass(slots=True)
class Tuned:
    """One role's tiles by so many rows.

    Attributes:
        seconds: of the whole pass by tile, the others' tiles being the best so far; fastest first. was: with the tile
            of the table. differing: tiles that changed a bit.
    """

    model: str
    role: str
    rows: int
    shape: tuple[int, int]
    was: float = 0.0
    seconds: dict[Any, float] = field(default_factory=dict)
    differing: list[Any] = field(default_factory=list)

    @property
    def best(self) -> Any:
        return next(iter(self.seconds))


def candidates(num_rows: int, num_inputs: int) -> list[Any]:
    """Tiles worth trying for so many rows."""
    from outrider.kernels.triton.linear import Tile

    most = max(8, min(64, 1 << (num_rows - 1).bit_length()))
    found = []
    for rows, outputs, inputs, warps in itertools.product((8, 16, 32, 64), OUTPUTS, INPUTS, (2, 4, 8)):
        step = 2 * outputs * inputs
        if rows not in (most, max(16, most)) or inputs > max(64, num_inputs) or not STEP[0] <= step <= STEP[1]:
            continue
        # Few weights need few warps to multiply them, and large products want two groups of them.
        if (warps == 2 and step > 8192) or (warps == 8 and outputs * rows < 4096):
            continue
        for coming in ON_THEIR_WAY[: 1 if rows == 8 else None]:
            stages = 1 + max(2, -(-coming // step))
            if (stages - 1) * 2 * (outputs + rows) * inputs <= SHARED_MEMORY:
                found.append(Tile(outputs, rows, inputs, warps, stages))
    return list(dict.fromkeys(found))


def random_model(shape: Shape, kernels: Kernels, device: torch.device, **sizes: int) -> LeanModel:
    """Layers of random weights, bfloat16."""
    given = {**shape.sizes, "num_hidden_layers": shape.num_layers, "max_position_embeddings": 2 * CONTEXT, **sizes}
    config = AutoConfig.for_model("llama", **given)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = LeanModel.from_module(module, kernels)
    if model is None:
        raise KernelError("a model of this shape has no lean layers: give one that has")
    model.graphs = None  # a graph is taken here for every tile
    return model


class Tuner:
    """Tries tiles in one model.

    Args:
        name: of the shape. tiles: candidates by rows and inputs.
    """

    def __init__(
        self,
        name: str,
        model: LeanModel,
        device: torch.device,
        tiles: Callable[[int, int], Sequence[Any]] = candidates,
        context: int = CONTEXT,
    ) -> None:
        self._name, self._model, self._device, self._tiles = name, model, device, tiles
        self._context = context
        self._pages = Pages(model.page_specs, (context // BLOCK + 8) * BLOCK, torch.bfloat16, device)
        self._batches: dict[int, FlatBatch] = {}
        self._found: dict[tuple[str, int], Tuned] = {}

    def run(self, num_rows: Sequence[int], deadline: float = float("inf")) -> Iterator[Tuned]:
        """Every role by so many rows, fewest first; no role is begun after `deadline` (`time.perf_counter`)."""
        roles = self._model.roles()
        for rows in sorted(num_rows):
            linears: list[Any] = list(itertools.chain(*roles.values()))
            for linear in linears:
                linear.tile = None
            was = self._seconds(rows)
            for role in roles:
                if time.perf_counter() > deadline:
                    return
                found = self._role(role, rows)
                found.was = was
                self._found[role, rows] = found
                yield found

    def forms(self, num_rows: Sequence[int]) -> list[tuple[Any, Any]]:
        """All that may be compiled."""
        from outrider.kernels.triton.offline import Form

        found = []
        for role, linears in self._model.roles().items():
            activation = "silu" if role == "gate_up" else None
            shape = linears[0].out_features, linears[0].in_features
            form = Form(*shape, "bfloat16", activation, role in ("o", "down"))
            tiles = (tile for rows in num_rows for tile in self._tiles(rows, form.num_inputs))
            found += [(form, tile) for tile in dict.fromkeys(tiles)]
        return found

    def _role(self, role: str, rows: int) -> Tuned:
        from outrider.kernels.triton.linear import choose

        linears: list[Any] = list(self._model.roles()[role])
        found = Tuned(self._name, role, rows, (linears[0].out_features, linears[0].in_features))
        seconds: dict[Any, float] = {None: self._seconds(rows)}  # None: the tile of the table
        expected = self._logits(rows)
        for tile in self._worth_trying(role, rows, found.shape[1]):
            self._try(linears, tile, rows, expected, seconds, found)
        chosen = choose(rows, *found.shape)
        best = min(seconds, key=lambda tile: seconds[tile]) or chosen
        for tile in (*(replace(best, ahead=ahead) for ahead in AHEAD), replace(best, late=not best.late)):
            self._try(linears, tile, rows, expected, seconds, found)
        for tile, taken in sorted(seconds.items(), key=lambda item: item[1]):
            found.seconds.setdefault(chosen if tile is None else tile, taken)
        for linear in linears:
            linear.tile = found.best
        return found

    def _try(
        self,
        linears: Sequence[Any],
        tile: Any,
        rows: int,
        expected: Tensor,
        seconds: dict[Any, float],
        found: Tuned,
    ) -> None:
        """Note how long the pass takes by this tile, or that it changes a bit; nothing where it cannot run."""
        for linear in linears:
            linear.tile = tile
        try:
            alike = torch.equal(self._logits(rows), expected)
        except Exception:  # whatever a compiler or a device refuses: too many registers, too much memory
            return
        if alike:
            seconds[tile] = self._seconds(rows)
        else:
            found.differing.append(tile)

    def _worth_trying(self, role: str, rows: int, num_inputs: int) -> list[Any]:
        known = [found for (name, fewer), found in self._found.items() if name == role and fewer < rows]
        kept = KEPT.get(rows, 0)
        if not kept or not known:
            return list(self._tiles(rows, num_inputs))
        own = {tile.rows for tile in self._tiles(rows, num_inputs)}
        fitting = ([tile for tile in found.seconds if tile.rows in own] for found in reversed(known))
        return list(dict.fromkeys(tile for tiles in fitting for tile in tiles[:kept]))

    def _seconds(self, rows: int) -> float:
        with torch.inference_mode():
            return seconds_of(self._device, replayed(self._device, lambda: self._logits(rows)), REPEATS, 1)

    def _logits(self, rows: int) -> Tensor:
        if rows not in self._batches:
            builder = BatchBuilder(BLOCK)
            builder.request(range(1, self._context // BLOCK + 7))
            builder.line(self._context - 1, [1] * rows, rows)
            self._batches[rows] = builder.build(self._device)
        batch = self._batches[rows]
        return self._model.forward(batch.tokens, batch.positions, batch.slots, batch.keys, self._pages)[0]


def tune_all(
    device: torch.device,
    names: Sequence[str] = tuple(SHAPES),
    num_rows: Sequence[int] = tuple(KEPT),
    seconds: float = 80,
) -> Iterator[Tuned]:
    """Every shape's roles by so many rows on a GPU, for so many seconds: kernels are compiled in other processes."""
    from outrider.kernels.triton.offline import compile_all

    deadline = time.perf_counter() + seconds
    kernels: Any = select("triton", device)
    tuners = [Tuner(name, random_model(SHAPES[name], kernels, device), device) for name in names]
    forms = [tuner.forms(num_rows) for tuner in tuners]
    major, minor = torch.cuda.get_device_capability(device)
    pool, compiled = compile_all(list(itertools.chain(*forms)), 10 * major + minor, kernels.overlap)
    try:
        for tuner, own in zip(tuners, forms, strict=True):
            wait(compiled[: len(own)], timeout=max(0.0, deadline - time.perf_counter()))
            compiled = compiled[len(own) :]
            yield from tuner.run(num_rows, deadline)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def table(found: Sequence[Tuned], slack: float = 1.003) -> str:
    """Entries of `TILES` for these rows: by most outputs, then by most inputs. A shape whose pass is no slower, within
    `slack`, by the tile of the next larger shape takes that."""
    lines = []
    for rows in sorted({each.rows for each in found}):
        entries: list[tuple[tuple[int, int], Any]] = []
        for each in sorted((each for each in found if each.rows == rows), key=lambda each: each.shape, reverse=True):
            last = entries[-1] if entries else None
            fits = last is not None and last[0] >= each.shape and last[0][1] >= each.shape[1]
            if last is not None and fits and each.seconds.get(last[1], 1e9) <= slack * each.seconds[each.best]:
                continue
            entries.append((each.shape, each.best))
        told = [f"({outputs}, {inputs}, {tile})" for (outputs, inputs), tile in reversed(entries)]
        told.append(f"(ANY, ANY, {entries[0][1]})")
        lines.append(f"({rows}, (" + ", ".join(told) + ")),")
    return re.sub(r"\b[a-z]+=", "", "\n".join(lines))
