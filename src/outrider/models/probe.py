"""What a model is asked at load: does it compute what Transformers computes, and do neighbours leave its rows alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.cache.pages import Pages
from outrider.errors import ModelError
from outrider.models.batch import BatchBuilder
from outrider.models.target import FIXED_WIDTH, Target

TOLERANCE = {"float32": 1e-3, "bfloat16": 2.5e-1}
"""Distance from Transformers' own logits, as a share of their spread, that rounding explains (upper quartile of rows).

Transformers' bfloat16 logits of SmolLM2-135M lie 0.1 from its float32 ones at the upper quartile of random tokens, and
0.29 at worst; a missed key or a foreign state moves a row by about 1.
"""

_PREFIX, _BRANCH = 12, 8
_BLOCK = 16
_WIDTHS = (2, 5, FIXED_WIDTH, 40)
_FARTHEST = 2048


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe found, for `doctor`.

    Attributes:
        reference_error: distance from Transformers' own logits, as a share of their spread, at the upper quartile of
            rows; None where there is no module to compare with (packed weights).
        rows_compared, rows_varied: rows run among other neighbours, widths and places, and how many changed any bit.
        widths: rows of the passes that were compared. fixed_width, exactness: what follows for the target.
    """

    reference_error: float | None
    rows_compared: int
    rows_varied: int
    widths: tuple[int, ...]
    fixed_width: int | None
    exactness: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Two texts that share a prefix, and Transformers' own logits (2, 20, V) for them."""

    tokens: Tensor
    logits: Tensor


@torch.inference_mode()
def reference(module: Any, vocab_size: int) -> Reference:
    """Run the module as it came (its own attention and mask) on two texts with a common prefix."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(vocab_size, (1, _PREFIX + _BRANCH), generator=generator)
    second = torch.cat((first[:, :_PREFIX], torch.randint(vocab_size, (1, _BRANCH), generator=generator)), dim=1)
    tokens = torch.cat((first, second)).to(module.device)
    logits = torch.stack([module(input_ids=text[None], use_cache=False).logits[0].float() for text in tokens])
    return Reference(tokens, logits)


def probe(target: Target, expected: Reference | None) -> Target:
    """Hold a target to its reference and to the invariance contract -> the target with what was found.

    A target whose rows depend on their neighbours falls back to passes of one fixed width; if they still do, to passes
    of a single row, which leave guessing without gain but the text the same; if even those differ (kernels that are not
    repeatable), it serves with `exactness="distribution"`, and says so.

    Raises:
        ModelError: if it does not compute what Transformers computes.
    """
    error = None if expected is None else check_reference(target, expected)
    compared, varied = check_invariance(target)
    for width in (FIXED_WIDTH, 1):
        if varied and target.fixed_width != width:
            now = "any width" if target.fixed_width is None else f"{target.fixed_width} rows a pass"
            note = f"rows depend on their neighbours at {now}: every pass runs at {width} rows"
            target = replace(target, fixed_width=width, notes=[*target.notes, note])
            compared, varied = check_invariance(target)
    if varied:
        note = f"{varied} of {compared} rows change from pass to pass even alone: only the law is exact"
        target = replace(target, exactness="distribution", notes=[*target.notes, note])
    report = ProbeReport(error, compared, varied, _widths(target), target.fixed_width, target.exactness)
    return replace(target, report=report)


def check_reference(target: Target, expected: Reference) -> float:
    """Run the two texts as a prefix and a tree of two branches in one pass -> distance from the reference.

    Raises:
        ModelError: if it is larger than rounding explains.
    """
    pages = target.make_pages(4 * _BLOCK)
    texts = expected.tokens.tolist()
    prefix = BatchBuilder(_BLOCK)
    prefix.request([1])
    prefix.line(0, texts[0][:_PREFIX], _PREFIX)
    branch = range(_BRANCH - 1)
    parents = [-1, *branch, -1, *(node + _BRANCH for node in branch)]
    tree = BatchBuilder(_BLOCK)
    tree.request([1])
    tree.tree(_PREFIX, [*texts[0][_PREFIX:], *texts[1][_PREFIX:]], parents, range(2 * _BLOCK, 3 * _BLOCK))
    logits = torch.cat([target.forward(part.build(target.device), pages).logits for part in (prefix, tree)])
    wanted = torch.cat((expected.logits[0], expected.logits[1, _PREFIX:]))[:, : target.vocab_size]
    logits = logits[:, : wanted.shape[1]]  # a widened twin has more words than its original, which says none of them
    distance = (logits - wanted).norm(dim=1) / (wanted - wanted.mean(1, keepdim=True)).norm(dim=1).clamp_min(1e-30)
    error = float(distance.quantile(0.75))
    if not error <= TOLERANCE[target.dtype]:  # NaN counts as too far
        raise ModelError(
            f"{target.name} ({target.config.model_type}) cannot be served: its logits are {error:.2g} away from "
            "Transformers' own, so it attends by a mask or keeps a state that a paged cache does not see"
        )
    return error


def check_invariance(target: Target) -> tuple[int, int]:
    """Run the same rows alone and among random neighbours -> rows compared, rows of which any bit changed.

    Compared are the logits, and the keys and values that the rows wrote. Far positions come without a long prefill:
    their block table names the same few blocks again and again.
    """
    generator = torch.Generator().manual_seed(1)
    last = min(target.max_positions, _FARTHEST) - 1
    lengths = _lengths(last)
    widths = _widths(target)
    rows = _Rows(target, last, max(widths) + len(lengths), generator)
    alone = [rows.run([length], [place]) for place, length in enumerate(lengths)]
    compared = varied = 0
    for width in widths:
        chosen = torch.randperm(len(lengths), generator=generator)[:width].tolist()
        extra = torch.randint(1, last + 2, (width - len(chosen),), generator=generator).tolist()
        order = torch.randperm(width, generator=generator).tolist()
        names = [*chosen, *range(len(lengths), len(lengths) + len(extra))]
        sizes = [*(lengths[i] for i in chosen), *extra]
        result = rows.run([sizes[i] for i in order], [names[i] for i in order])
        for place, index in enumerate(order):
            if index < len(chosen):
                compared += 1
                varied += not _same(result, place, alone[names[index]])
    return compared, varied


class _Rows:
    """Rows by number: each has its token and slot whatever pass it runs in, above one shared written context."""

    def __init__(self, target: Target, last: int, most: int, generator: torch.Generator) -> None:
        """most: how many numbers there are."""
        self.target = target
        self.tokens = torch.randint(target.vocab_size, (most,), generator=generator).tolist()
        self.first_slot = 5 * _BLOCK
        self.pages: Pages = target.make_pages(self.first_slot + most)
        # Blocks 1 to 4, over and over, in an order without a period that a split of the keys could hide in.
        self.table = torch.randint(1, 5, (last // _BLOCK + 1,), generator=generator).tolist()
        context = BatchBuilder(_BLOCK)
        context.request([1, 2, 3, 4])
        count = min(4 * _BLOCK, last + 1)
        context.line(0, torch.randint(target.vocab_size, (count,), generator=generator).tolist(), 1)
        target.forward(context.build(target.device), self.pages)

    def run(self, lengths: Sequence[int], names: Sequence[int]) -> tuple[Tensor, ...]:
        """Run rows with so many keys each -> logits (T, V), then per layer what was written: (T, Hkv, D)."""
        builder = BatchBuilder(_BLOCK)
        builder.request(self.table)
        slots = [self.first_slot + name for name in names]
        for length, name, slot in zip(lengths, names, slots, strict=True):
            builder.node(self.tokens[name], length - 1, [slot])
        logits = self.target.forward(builder.build(self.target.device), self.pages).logits
        return logits, *(page[slots] for page in (*self.pages.keys, *self.pages.values))


def _lengths(last: int) -> list[int]:
    """Numbers of keys of the rows that are compared: the first position, one block, half way, the last."""
    return sorted({1, min(_BLOCK, last), (last + 1) // 2, last + 1})


def _widths(target: Target) -> tuple[int, ...]:
    """Rows of the passes that are compared: a full padded pass, or else every path that the kernels take by width."""
    return tuple(sorted({*_WIDTHS, *((target.fixed_width,) if target.fixed_width else target.kernels.wide)}))


def _same(result: tuple[Tensor, ...], place: int, alone: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(many[place], one[0]) for many, one in zip(result, alone, strict=True))
