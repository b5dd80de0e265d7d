"""What a request wants to be told of a cycle besides its tokens: log-probabilities, and what was guessed."""

from __future__ import annotations

from torch import Tensor

from outrider.errors import OutriderError
from outrider.record import CycleTrace, NodeTrace
from outrider.request import TokenLogprob
from outrider.sampling import logprobs
from outrider.sampling.context import Context, Row
from outrider.sampling.warp import law, warp
from outrider.tree import ROOT, DraftTree, Verdict


def told(
    context: Context, tree: DraftTree, verdict: Verdict, all_logits: Tensor, root: int
) -> list[TokenLogprob] | None:
    """One row of log-probabilities a token of the verdict where wanted; a wanted trace joins `request.cycles`.

    To be called before the verdict's tokens enter the output.

    all_logits: (M, V) float32, the request's N + 1 rows beginning at `root`.

    Raises:
        NumericsError, RequestError: as `law`.
    """
    params = context.params
    if params.logprobs is None and not params.trace:
        return None
    logits = all_logits[root : root + len(tree) + 1]
    if params.trace:
        context.request.cycles.append(trace(context, tree, verdict, logits))
    if params.logprobs is None:
        return None
    return logprobs.of_verdict(context, tree, verdict, logits, len(verdict.tokens))


def trace(context: Context, tree: DraftTree, verdict: Verdict, logits: Tensor) -> CycleTrace:
    """Every node with `p`, `q` and its verdict; logits (N + 1, V) float32, the root's row first."""
    rows = context.rows(tree)
    reached = {ROOT, *verdict.path}
    wanted = {*tree.parents, verdict.path[-1] if verdict.path else ROOT}
    laws = {node: _law(logits[node + 1], rows[node + 1]) for node in wanted}
    nodes = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        q = None if tree.laws is None else float(tree.laws[node, token])
        said = "accepted" if node in reached else "rejected" if parent in reached else "unreached"
        nodes.append(NodeTrace(token, parent, _chance(laws[parent], token), q, said))
    drawn = verdict.tokens[-1]
    return CycleTrace(tuple(nodes), drawn, _chance(laws[verdict.path[-1] if verdict.path else ROOT], drawn))


def _law(logits: Tensor, row: Row) -> Tensor | None:
    """The law of one row (V,) float64; None where there is none, and on a path that a grammar forbids."""
    if row.is_dead:
        return None
    try:
        return law(warp(logits, row), row.context.temperature)
    except OutriderError:
        return None


def _chance(law: Tensor | None, token: int) -> float | None:
    return None if law is None else float(law[token])
