"""From logits to verdicts: what the target says of every guess, by the match rule or the rejection rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.kernels.base import Kernels
from outrider.kernels.parcel import send
from outrider.sampling.context import Context, Row
from outrider.sampling.rejection import KeyedChoices, parts, sent, verify_rejection
from outrider.sampling.rows import warp_rows
from outrider.sampling.warp import explain, laws, warp
from outrider.tree import ROOT, DraftTree, Verdict


def verify(
    trees: Sequence[DraftTree],
    logits: Tensor,
    contexts: Sequence[Context],
    kernels: Kernels,
    acceptance: str = "match",
    starts: Sequence[int] | None = None,
) -> list[Verdict | OutriderError]:
    """The verdict on every request's tree; a request that cannot go on gets its error, the others their verdicts.

    Args:
        trees: one a request; the empty tree is plain decoding.
        logits: (M, V) float32; request `r` has `len(trees[r]) + 1` rows from `starts[r]` on, its root's first.
        contexts: one a request, at the state before this cycle.
        acceptance: "match" or "rejection"; a greedy request has one text, so both are the match rule for it.
        starts: by default the requests' rows follow one another.

    A row without a law (NaN, or every token forbidden) matters only if the walk reaches it: plain decoding would never
    have seen the others. Below the root it ends the walk before itself: what was said until there is delivered, and
    the next cycle, whose root it is, gives the error.
    """
    if starts is None:
        starts = [0, *accumulate(len(tree) + 1 for tree in trees)][:-1]
    noise_is_dear = _noise_is_dear(logits.device)
    verdicts: dict[int, Verdict | OutriderError] = {}
    at_once: list[_Ask] = []
    warped: list[_Ask] = []
    in_waves: list[_Ask] = []
    rejecting: list[_Ask] = []
    for r, (tree, context, start) in enumerate(zip(trees, contexts, starts, strict=True)):
        ask = _Ask(r, tree, context, logits, start)
        if acceptance == "rejection" and context.temperature > 0:
            rejecting.append(ask)
        elif context.warper is not None and context.warps(context.position) and not context.params.automaton:
            warped.append(ask)
        elif context.warps(context.position) or (tree.tokens and context.temperature > 0 and noise_is_dear):
            in_waves.append(ask)
        else:
            at_once.append(ask)
    if at_once:
        verdicts.update(_match_at_once(at_once, logits, kernels))
    if warped:
        verdicts.update(_match_warped(warped, logits, kernels))
    verdicts.update(_match_in_waves(in_waves, kernels))
    for part in parts(rejecting, logits.shape[1], logits.device):
        verdicts.update(_reject(part))
    return [verdicts[r] for r in range(len(trees))]


def verify_match(tree: DraftTree, draw: Callable[[int], int]) -> Verdict:
    """The match rule: step down while a child carries the token that the target draws itself.

    draw: the target's own draw at row 0 (the root) and `i + 1` (after node `i`), asked only for rows that the walk
    reaches; where it is -1 (no law), the walk ends and -1 is the verdict's last token.
    """
    walk = _walk(tree)
    row = next(walk)
    while True:
        try:
            row = walk.send(draw(row))
        except StopIteration as end:
            verdict: Verdict = end.value
            return verdict


def _walk(tree: DraftTree) -> Generator[int, int, Verdict]:
    """`verify_match` inside out: yields the row it has reached, is sent the token drawn there."""
    child = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    tokens = [(yield 0)]
    node = child.get((ROOT, tokens[0]))
    while node is not None:
        path.append(node)
        tokens.append((yield node + 1))
        node = child.get((node, tokens[-1]))
    return Verdict(tuple(path), tuple(tokens))


@dataclass(frozen=True, slots=True)
class _Ask:
    """One request's part of a call: its place in it, and its rows (N + 1, V) of the logits, from row `start` on.

    The rows are cut out only where they are looked at one by one: most are drawn from where they lie.
    """

    index: int
    tree: DraftTree
    context: Context
    all_logits: Tensor
    start: int

    @property
    def logits(self) -> Tensor:
        return self.all_logits[self.start : self.start + len(self.tree) + 1]


def _noise_is_dear(device: torch.device) -> bool:
    """Whether the noise of a row costs more than another call of the kernel does."""
    return device.type == "cpu"


def _match_at_once(asks: list[_Ask], logits: Tensor, kernels: Kernels) -> dict[int, Verdict | OutriderError]:
    """Draw at every row in one call, logits where they lie: an argmax costs little, and a device is asked but once.

    A row is drawn at the output position of its depth, so siblings and cousins share their noise. Rows of others are
    drawn greedily, which costs no noise, and not looked at.
    """
    num_rows = logits.shape[0]
    keys = _Keys([0.0] * num_rows, [0] * num_rows, [0] * num_rows, [0] * num_rows)
    for ask in asks:
        keys.set(ask.start, ask)
    drawn = keys.draw(kernels, logits)
    return {ask.index: _match(ask, drawn, ask.start) for ask in asks}


def _match_warped(asks: list[_Ask], logits: Tensor, kernels: Kernels) -> dict[int, Verdict | OutriderError]:
    """Warp and draw every row of every tree, each in one call: on a device the host is then waited for but once."""
    places: list[int] = []
    rows: list[Row] = []
    starts: list[int] = []
    for ask in asks:
        starts.append(len(rows))
        rows += ask.context.rows(ask.tree)
        places += range(ask.start, ask.start + len(ask.tree) + 1)
    warper = asks[0].context.warper
    assert warper is not None
    num_rows = len(rows)
    keys = _Keys([0.0] * num_rows, [0] * num_rows, [0] * num_rows, [0] * num_rows)
    for ask, start in zip(asks, starts, strict=True):
        keys.set(start, ask)
    drawn = keys.draw(kernels, warp_rows(warper, logits, places, rows))
    return {ask.index: _match(ask, drawn, start) for ask, start in zip(asks, starts, strict=True)}


@dataclass(frozen=True, slots=True)
class _Keys:
    """What the draw of each row is keyed by, on the host; at temperature 0 a row needs no noise."""

    temperatures: list[float]
    seeds: list[int]
    samples: list[int]
    positions: list[int]

    def set(self, first: int, ask: _Ask) -> None:
        """The rows of a request's tree, from `first` on."""
        context, tree, last = ask.context, ask.tree, first + len(ask.tree) + 1
        base = context.position
        self.temperatures[first:last] = [context.temperature] * (last - first)
        self.seeds[first:last] = [context.seed_bits] * (last - first)
        self.samples[first:last] = [context.request.sample] * (last - first)
        self.positions[first:last] = [base, *(base + depth for depth in tree.depths())] if tree.tokens else [base]

    def draw(self, kernels: Kernels, weights: Tensor) -> list[int]:
        arrays = (
            np.array(self.temperatures, dtype=np.float32),
            np.array(self.seeds, dtype=np.int64),
            np.array(self.samples, dtype=np.int32),
            np.array(self.positions, dtype=np.int32),
        )
        ids: list[int] = kernels.draw(weights, *send(arrays, weights.device)).tolist()
        return ids


def _match(ask: _Ask, drawn: list[int], start: int) -> Verdict | OutriderError:
    """The verdict of one request, whose rows were drawn from `start` on."""
    if not ask.tree.tokens:  # plain decoding: nothing to walk
        return _checked(ask, Verdict((), (drawn[start],)))
    return _checked(ask, verify_match(ask.tree, drawn[start : start + len(ask.tree) + 1].__getitem__))


def _match_in_waves(asks: list[_Ask], kernels: Kernels) -> dict[int, Verdict | OutriderError]:
    """Draw only the rows that the walks reach, those of all requests at one depth together.

    Few of a tree's rows are reached, and the others need neither warp nor noise.
    """
    verdicts: dict[int, Verdict | OutriderError] = {}
    walks = [(ask, ask.context.rows(ask.tree), _walk(ask.tree)) for ask in asks]
    wave = [(ask, rows, walk, next(walk)) for ask, rows, walk in walks]
    while wave:
        weights, alive = [], []
        for ask, rows, walk, row in wave:
            try:
                weights.append(warp(ask.logits[row], rows[row]))
                alive.append((ask, rows, walk, row))
            except OutriderError:
                try:
                    walk.send(-1)
                except StopIteration as end:
                    verdicts[ask.index] = _checked(ask, end.value)
        wave = []
        for (ask, rows, walk, _), token in zip(alive, _draw_rows(weights, alive, kernels), strict=True):
            try:
                wave.append((ask, rows, walk, walk.send(token)))
            except StopIteration as end:
                verdicts[ask.index] = _checked(ask, end.value)
    return verdicts


def _draw_rows(
    weights: list[Tensor], wave: Sequence[tuple[_Ask, list[Row], object, int]], kernels: Kernels
) -> list[int]:
    """The draw at one row of each request, its weights made already."""
    if not weights:
        return []
    contexts = [ask.context for ask, *_ in wave]
    keys = _Keys(
        [context.temperature for context in contexts],
        [context.seed_bits for context in contexts],
        [context.request.sample for context in contexts],
        [rows[row].position for _, rows, _, row in wave],
    )
    return keys.draw(kernels, torch.stack(weights) if len(weights) > 1 else weights[0].unsqueeze(0))


def _checked(ask: _Ask, verdict: Verdict) -> Verdict | OutriderError:
    """The verdict up to the last token that could be drawn, or why there is none."""
    if verdict.tokens[-1] >= 0:
        return verdict
    if verdict.path:
        return Verdict(verdict.path[:-1], verdict.tokens[:-1])
    try:
        problem = explain(warp(ask.logits[0], ask.context.rows(ask.tree)[0]))
    except OutriderError as error:
        return error
    assert problem is not None, "a row with a law was not drawn from"
    return problem


def _reject(asks: Sequence[_Ask]) -> dict[int, Verdict | OutriderError]:
    """The rejection rule with the noise of this cycle, whose number is the output position of its root."""
    device = asks[0].all_logits.device
    rows = {n: ask.context.rows(ask.tree) for n, ask in enumerate(asks) if ask.context.warps(ask.context.position)}

    def target_laws(numbers: Sequence[int], nodes: Sequence[int]) -> Tensor:
        reached = np.array([asks[number].start + node + 1 for number, node in zip(numbers, nodes, strict=True)])
        weights = asks[0].all_logits.index_select(0, sent(reached, device))
        for place, (number, node) in enumerate(zip(numbers, nodes, strict=True)):
            if number in rows:
                try:
                    weights[place] = warp(weights[place], rows[number][node + 1])
                except OutriderError:  # which `_checked` gets again, where it is to be told
                    weights[place] = math.nan
        return laws(weights, [asks[number].context.temperature for number in numbers])

    trees = [ask.tree for ask in asks]
    keys = [(ask.context.request.seed, ask.context.request.sample, ask.context.position) for ask in asks]
    verdicts = verify_rejection(trees, target_laws, KeyedChoices(trees, keys))
    return {ask.index: _checked(ask, verdict) for ask, verdict in zip(asks, verdicts, strict=True)}
