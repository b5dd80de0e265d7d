"""From logits to verdicts: what the target says of every guess, by the match rule or the rejection rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.kernels.base import Kernels
from outrider.sampling import rejection
from outrider.sampling.context import Context, Row
from outrider.sampling.warp import explain, law, warp
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

    A row without a law (NaN, or every token forbidden) is an error only if the walk reaches it: plain decoding would
    never have seen the others.
    """
    if starts is None:
        starts = [0]
        for tree in trees[:-1]:
            starts.append(starts[-1] + len(tree) + 1)
    drawn: list[int] = []
    straight = [_is_matched(context, acceptance) and not context.warps(context.position) for context in contexts]
    if any(straight):
        drawn = _draw_straight(list(compress(zip(trees, contexts, starts, strict=True), straight)), logits, kernels)
    verdicts: list[Verdict | OutriderError] = []
    for r, (tree, context) in enumerate(zip(trees, contexts, strict=True)):
        rows = slice(starts[r], starts[r] + len(tree) + 1)
        try:
            if straight[r]:
                verdict = verify_match(tree, drawn[rows].__getitem__)
            elif _is_matched(context, acceptance):
                verdict = verify_match(tree, partial(_draw_warped, logits[rows], context.rows(tree), kernels))
            else:
                verdict = _reject(tree, logits[rows], context)
            if verdict.tokens[-1] < 0:
                raise _explain(logits[rows], tree, verdict, context)
            verdicts.append(verdict)
        except OutriderError as error:
            verdicts.append(error)
    return verdicts


def verify_match(tree: DraftTree, draw: Callable[[int], int]) -> Verdict:
    """The match rule: step down while a child carries the token that the target draws itself.

    draw: the target's own draw at row 0 (the root) and `i + 1` (after node `i`), asked only for rows that the walk
    reaches; where it is -1 (no law), the walk ends and -1 is the verdict's last token.
    """
    child = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    tokens = [draw(0)]
    node = child.get((ROOT, tokens[0]))
    while node is not None:
        path.append(node)
        tokens.append(draw(node + 1))
        node = child.get((node, tokens[-1]))
    return Verdict(tuple(path), tuple(tokens))


def _is_matched(context: Context, acceptance: str) -> bool:
    return acceptance == "match" or context.temperature == 0


def _draw_straight(requests: list[tuple[DraftTree, Context, int]], logits: Tensor, kernels: Kernels) -> list[int]:
    """The target's draw at every row of requests that need no warp, all in one call, their logits where they lie.

    A row is drawn at the output position of its depth, so siblings and cousins share their noise. Rows of others are
    drawn greedily, which costs no noise, and not looked at.
    """
    num_rows = logits.shape[0]
    temperatures, seeds = [0.0] * num_rows, [0] * num_rows
    samples, positions = [0] * num_rows, [0] * num_rows
    for tree, context, start in requests:
        base = context.position
        for row, depth in enumerate((0, *tree.depths()), start):
            temperatures[row], seeds[row] = context.temperature, context.seed_bits
            samples[row], positions[row] = context.request.sample, base + depth
    ids: list[int] = _draw(kernels, logits, temperatures, seeds, samples, positions)
    return ids


def _draw_warped(logits: Tensor, rows: list[Row], kernels: Kernels, row: int) -> int:
    """The target's draw at one row of a request, its weights made when the walk gets there: few rows are reached."""
    context = rows[row].context
    weights = warp(logits[row], rows[row]).unsqueeze(0)
    return _draw(
        kernels, weights, [context.temperature], [context.seed_bits], [context.request.sample], [rows[row].position]
    )[0]


def _draw(
    kernels: Kernels,
    weights: Tensor,
    temperatures: list[float],
    seeds: list[int],
    samples: list[int],
    positions: list[int],
) -> list[int]:
    device = weights.device
    ids: list[int] = kernels.draw(
        weights,
        torch.tensor(temperatures, dtype=torch.float32, device=device),
        torch.tensor(seeds, dtype=torch.int64, device=device),
        torch.tensor(samples, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
    ).tolist()
    return ids


def _explain(logits: Tensor, tree: DraftTree, verdict: Verdict, context: Context) -> OutriderError:
    """Why nothing could be drawn where the walk ended."""
    row = verdict.path[-1] + 1 if verdict.path else 0
    problem = explain(warp(logits[row], context.rows(tree)[row]))
    assert problem is not None, "a row with a law was not drawn from"
    return problem


def _reject(tree: DraftTree, logits: Tensor, context: Context) -> Verdict:
    """The rejection rule with the noise of this cycle, whose number is the output position of its root."""
    request, cycle = context.request, context.position
    rows = context.rows(tree)

    def target_law(node: int) -> Tensor:
        return law(warp(logits[node + 1], rows[node + 1]), context.temperature)

    return rejection.verify_rejection(
        tree,
        target_law,
        rejection.accept_uniforms(len(tree), request.seed, request.sample, cycle),
        partial(rejection.pick_residual, seed=request.seed, sample=request.sample, position=cycle),
    )
