"""The rejection rule as it is defined: one request, one node and one child at a time, the noise on Python integers."""

import math

import torch

from outrider.errors import OutriderError
from outrider.kernels.noise import Purpose, philox4x32, stream
from outrider.sampling.warp import law, warp
from outrider.tree import ROOT, Verdict


def scalars(seed, sample, position, stream_, num):
    """`num` uniforms in (0, 1) of 52 bits."""
    key, out = (seed & 0xFFFFFFFF, seed >> 32), []
    for block in range(-(-num // 2)):
        w0, w1, w2, w3 = philox4x32((block, position, sample, stream_), key)
        out += [((high << 20 | low >> 12) + 0.5) * 2.0**-52 for high, low in ((w0, w1), (w2, w3))]
    return out[:num]


def reject(tree, logits, context):
    """The verdict on one request's tree, or its error; logits: (N + 1, V)."""
    key = (context.request.seed, context.request.sample, context.position)
    rows, path, node = context.rows(tree), [], ROOT
    while True:
        try:
            p = law(warp(logits[node + 1], rows[node + 1]), context.temperature)
        except OutriderError as error:
            return Verdict(tuple(path[:-1]), tuple(tree.tokens[i] for i in path)) if path else error
        children = tree.children(node)
        q = draft_law(tree, children)
        for child in children:
            token = tree.tokens[child]
            (uniform,) = scalars(*key, stream(Purpose.ACCEPT, child), 1)
            if uniform < float(p[token] if q is None else p[token] / q[token]):
                break
            if q is None:
                p = without(p, token)
            else:
                p = normalised((p - q).clamp_(min=0.0), p)
                q = without(q, token)
        else:
            (uniform,) = scalars(*key, stream(Purpose.RESIDUAL, node), 1)
            return Verdict(tuple(path), (*(tree.tokens[i] for i in path), invert(p, uniform)))
        path.append(child)
        node = child


def draft_siblings(law_, num, seed, sample, position, node):
    """Children of a node, without replacement."""
    weights, tokens = law_.double().clone(), []
    if not bool(torch.isfinite(weights).all()):
        return ()
    for uniform in scalars(seed, sample, position, stream(Purpose.DRAFT, node), num):
        if bool((weights > 0).any()):
            tokens.append(invert(weights, uniform))
            weights[tokens[-1]] = 0.0
    return tuple(tokens)


def invert(weights, uniform):
    """The token at which the running sum of weights (V,) passes `uniform` of their total."""
    tokens = weights.nonzero().flatten()
    mass = weights[tokens].cumsum(0)
    index = int(torch.searchsorted(mass, mass[-1] * uniform, right=True))
    return int(tokens[min(index, len(tokens) - 1)])


def draft_law(tree, children):
    """What the children were drawn from; None where they are point masses."""
    if tree.laws is None or not children:
        return None
    q = tree.laws[children[0]].double()
    total = float(q.sum())
    if not math.isfinite(total) or any(float(q[tree.tokens[child]]) <= 0 for child in children):
        return None
    return q / total


def without(law_, token):
    rest = law_.clone()
    rest[token] = 0.0
    return normalised(rest, law_)


def normalised(weights, otherwise):
    total = weights.sum()
    return weights / total if float(total) > 0 else otherwise
