"""The rejection rule: the same law as plain sampling, though not the same text.

Chains as Leviathan et al. (arXiv:2211.17192), siblings without replacement as Sequoia (arXiv:2402.12374). It holds
only if the number of a node's children was fixed before they were drawn and none was dropped afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.kernels.noise import Purpose, scalars, stream
from outrider.tree import ROOT, DraftTree, Verdict


def verify_rejection(
    tree: DraftTree,
    law: Callable[[int], Tensor],
    uniforms: Sequence[float],
    pick: Callable[[int, Tensor], int],
) -> Verdict:
    """Walk the tree; each child in turn is accepted or removed from the law.

    Args:
        tree: its `laws` are what the siblings were drawn from, without replacement; None means point masses.
        law: the target's law at a node (or `ROOT`): (V,) float64, summing to 1; asked only for nodes reached.
        uniforms: N uniforms in (0, 1), by node.
        pick: draws a token at a node from (V,) float64 weights that sum to 1.

    Raises:
        OutriderError: from `law` at the root.
    """
    path: list[int] = []
    node = ROOT
    while True:
        try:
            p = law(node)
        except OutriderError:
            if not path:
                raise
            # What was accepted stands; the next cycle starts at this node and gives the error.
            return Verdict(tuple(path[:-1]), tuple(tree.tokens[i] for i in path))
        children = tree.children(node)
        q = _draft_law(tree, children)
        for child in children:
            token = tree.tokens[child]
            if q is not None:
                if uniforms[child] < float(p[token] / q[token]):
                    break
                p = _normalised((p - q).clamp_(min=0.0), p)
                q = _without(q, token)
            else:
                if uniforms[child] < float(p[token]):
                    break
                p = _without(p, token)
        else:
            tokens = [tree.tokens[i] for i in path]
            return Verdict(tuple(path), (*tokens, pick(node, p)))
        path.append(child)
        node = child


def draft_siblings(law: Tensor, num: int, seed: int, sample: int, position: int, node: int) -> tuple[int, ...]:
    """Draw up to `num` children of a node from `law`, without replacement, in the order in which they are tried.

    law: (V,) of any scale, the very tensor that goes into `DraftTree.laws`. seed, sample, position (output position of
    the cycle's root) and node (the parent's index, or `ROOT`) are the key. `num` is fixed before anything is drawn, and
    every child drawn must enter the tree. Fewer come where the law has fewer tokens; none where it holds a NaN.
    """
    weights = law.to(torch.float64)
    if not bool(torch.isfinite(weights).all()):
        return ()
    weights = weights.clone()
    tokens: list[int] = []
    for uniform in scalars(seed, sample, position, stream(Purpose.DRAFT, node), num):
        if not bool((weights > 0).any()):
            break
        tokens.append(invert(weights, uniform))
        weights[tokens[-1]] = 0.0
    return tuple(tokens)


def accept_uniforms(num_nodes: int, seed: int, sample: int, position: int) -> list[float]:
    """One uniform a node, of the ACCEPT streams of a cycle."""
    return [scalars(seed, sample, position, stream(Purpose.ACCEPT, node), 1)[0] for node in range(num_nodes)]


def pick_residual(node: int, weights: Tensor, seed: int, sample: int, position: int) -> int:
    """Draw the cycle's last token, at `node`, from weights (V,) float64."""
    return invert(weights, scalars(seed, sample, position, stream(Purpose.RESIDUAL, node), 1)[0])


def invert(weights: Tensor, uniform: float) -> int:
    """The token at which the running sum of weights (V,) float64 passes `uniform` of their total; never one of 0."""
    tokens = weights.nonzero().flatten()
    mass = weights[tokens].cumsum(0)
    index = int(torch.searchsorted(mass, mass[-1] * uniform, right=True))
    return int(tokens[min(index, len(tokens) - 1)])  # the product may round up to the total itself


def _draft_law(tree: DraftTree, children: list[int]) -> Tensor | None:
    """What the children were drawn from, (V,) float64 summing to 1; None where they are point masses.

    A law that holds a NaN, or could not have drawn one of the children, was not drawn from. Point masses are exact for
    any guesses that were chosen without the noise of this walk.
    """
    if tree.laws is None or not children:
        return None
    q = tree.laws[children[0]].to(torch.float64)
    total = float(q.sum())
    if not math.isfinite(total) or any(float(q[tree.tokens[child]]) <= 0 for child in children):
        return None
    return q / total


def _without(law: Tensor, token: int) -> Tensor:
    rest = law.clone()
    rest[token] = 0.0
    return _normalised(rest, law)


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights over their sum; `otherwise` where nothing is left, which happens by rounding alone."""
    total = weights.sum()
    return weights / total if float(total) > 0 else otherwise
