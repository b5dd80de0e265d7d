"""From logits to verdicts: what the target says of every guess, by the match rule or the rejection rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
    matched = [r for r, c in enumerate(contexts) if acceptance == "match" or c.temperature == 0]
    verdicts: dict[int, Verdict | OutriderError] = {}
    if matched:
        drawn = _draw(
            [trees[r] for r in matched], logits, [contexts[r] for r in matched], kernels, [starts[r] for r in matched]
        )
        for r, tokens in zip(matched, drawn, strict=True):
            verdicts[r] = _match(trees[r], tokens, logits, starts[r], contexts[r])
    for r in set(range(len(trees))).difference(matched):
        try:
            verdicts[r] = _reject(trees[r], logits[starts[r] :], contexts[r])
        except OutriderError as error:
            verdicts[r] = error
    return [verdicts[r] for r in range(len(trees))]


def verify_match(tree: DraftTree, drawn: Sequence[int]) -> Verdict:
    """The match rule: step down while a child carries the token that the target drew itself.

    drawn: N + 1 tokens, the target's own draw at the root and then at each node; where it is -1 (no law), the walk ends
    and -1 is the verdict's last token.
    """
    child = {(parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    tokens = [drawn[0]]
    node = child.get((ROOT, drawn[0]))
    while node is not None:
        path.append(node)
        tokens.append(drawn[node + 1])
        node = child.get((node, drawn[node + 1]))
    return Verdict(tuple(path), tuple(tokens))


def _draw(
    trees: list[DraftTree], logits: Tensor, contexts: list[Context], kernels: Kernels, starts: list[int]
) -> list[list[int]]:
    """The target's own draw at every row of every tree: one call of the kernel, and one more for rows that warp.

    Rows that need no warp are read where they lie. A row is drawn at the output position of its depth, so siblings and
    cousins of one depth share their noise.
    """
    num_rows = logits.shape[0]
    temperatures, seeds = [0.0] * num_rows, [0] * num_rows
    samples, positions = [0] * num_rows, [0] * num_rows
    warped: dict[int, Tensor] = {}
    for tree, context, start in zip(trees, contexts, starts, strict=True):
        base = context.position
        for row, depth in enumerate((0, *tree.depths()), start):
            temperatures[row], seeds[row] = context.temperature, context.seed_bits
            samples[row], positions[row] = context.request.sample, base + depth
        if context.warps(base):  # a later position warps only if the first does
            warped.update(_warped(context.rows(tree), logits, start))

    def draw(weights: Tensor, rows: Sequence[int] | None = None) -> list[int]:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            chosen = values if rows is None else [values[row] for row in rows]
            return torch.tensor(chosen, dtype=dtype, device=logits.device)

        ids: list[int] = kernels.draw(
            weights,
            column(temperatures, torch.float32),
            column(seeds, torch.int64),
            column(samples, torch.int32),
            column(positions, torch.int32),
        ).tolist()
        return ids

    special = list(warped)
    drawn = [-1] * num_rows
    if special:
        for row, token in zip(special, draw(torch.stack(list(warped.values())), special), strict=True):
            drawn[row] = token
        for row in special:
            temperatures[row] = 0.0  # drawn already: no noise for it in the call below
    if len(special) < num_rows:
        for row, token in enumerate(draw(logits)):
            if row not in warped:
                drawn[row] = token
    return [drawn[start : start + len(tree) + 1] for tree, start in zip(trees, starts, strict=True)]


def _warped(rows: list[Row], logits: Tensor, start: int) -> dict[int, Tensor]:
    """The weights of the rows that differ from their logits, by row of the batch."""
    out = {}
    for i, row in enumerate(rows, start):
        try:
            weights = warp(logits[i], row)
        except OutriderError:
            weights = torch.full_like(logits[i], -torch.inf)  # `_match` raises it again if the walk gets here
        if weights.data_ptr() != logits[i].data_ptr():
            out[i] = weights
    return out


def _match(tree: DraftTree, drawn: list[int], logits: Tensor, start: int, context: Context) -> Verdict | OutriderError:
    verdict = verify_match(tree, drawn)
    if verdict.tokens[-1] >= 0:
        return verdict
    index = verdict.path[-1] + 1 if verdict.path else 0
    try:
        problem = explain(warp(logits[start + index], context.rows(tree)[index]))
    except OutriderError as error:
        return error
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
