"""A toy law over a few tokens, the draw as it is defined, and the loop around `verify`."""

import functools
import math
import random

import torch

from outrider.kernels import noise
from outrider.request import Request, SamplingParams
from outrider.sampling.context import Context
from outrider.sampling.verify import verify
from outrider.tree import ROOT, DraftTree


def gumbel_row(seed, sample, position, vocab_size):
    """The noise of one row on Python integers and floats."""
    out = []
    for block in range(-(-vocab_size // 4)):
        words = noise.philox4x32((block, position, sample, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
        out += [-math.log(-math.log((word + 0.5) * 2.0**-32)) for word in words]
    return out[:vocab_size]


class DrawKernels:
    """Only the draw, straight from its definition in `kernels/base.py`, one row at a time."""

    name = "definition"
    fixed_width = None

    def draw(self, logits, temperature, seeds, samples, positions):
        columns = (logits.tolist(), temperature.tolist(), seeds.tolist(), samples.tolist(), positions.tolist())
        return torch.tensor([self.draw_row(*row) for row in zip(*columns, strict=True)])

    @staticmethod
    def draw_row(values, temperature, seed, sample, position):
        if any(map(math.isnan, values)) or max(values) == -math.inf:
            return -1
        if temperature > 0:
            noisy = gumbel_row(seed, sample, position, len(values))
            values = [value / temperature + g for value, g in zip(values, noisy, strict=True)]
        return values.index(max(values))


class ToyModel:
    """Logits that depend on the last `memory` tokens (None: all), always the same for the same tokens."""

    def __init__(self, vocab_size, seed=0, scale=2.0, memory=None):
        self.vocab_size, self.seed, self.scale, self.memory = vocab_size, seed, scale, memory
        self.logits = functools.lru_cache(maxsize=None)(self._logits)

    def _logits(self, tokens):
        generator = torch.Generator().manual_seed(random.Random(f"{self.seed}{tokens}").getrandbits(48))
        return torch.randn(self.vocab_size, generator=generator) * self.scale

    def rows(self, sequence, tree):
        """The rows of a pass over the root and the nodes: (N + 1, V) float32."""
        paths = [tuple(sequence[-self.memory :] if self.memory else sequence)]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return torch.stack([self.logits(path[-self.memory :] if self.memory else path) for path in paths])


def make(request_id=0, prompt=(0, 1), seed=1, sample=0, end_ids=(), **params):
    return Request(
        request_id, tuple(prompt), SamplingParams(**params), seed=seed, sample=sample, end_ids=frozenset(end_ids)
    )


def decode(request, model, guess, num_tokens, acceptance="match", kernels=None, context=None):
    """Extend a request to `num_tokens` tokens; `guess(request)` is the cycle's tree. Returns the number of cycles."""
    context = context or Context(request, model.vocab_size)
    cycles = 0
    while len(request.output) < num_tokens:
        tree = guess(request)
        logits = model.rows((*request.prompt, *request.output), tree)
        (verdict,) = verify([tree], logits, [context], kernels or DrawKernels(), acceptance)
        if isinstance(verdict, Exception):
            raise verdict
        request.output.extend(verdict.tokens[: num_tokens - len(request.output)])
        cycles += 1
    return cycles


def random_tree(rng, vocab_size, most_nodes, most_depth=8):
    """A tree in topological order with distinct siblings, of up to `most_nodes` nodes."""
    tokens, parents, depths = [], [], []
    for _ in range(rng.randint(0, most_nodes)):
        parent = rng.randint(ROOT, len(tokens) - 1)
        depth = 1 if parent == ROOT else depths[parent] + 1
        free = [t for t in range(vocab_size) if (parent, t) not in set(zip(parents, tokens, strict=True))]
        if free and depth <= most_depth:
            tokens.append(rng.choice(free))
            parents.append(parent)
            depths.append(depth)
    return DraftTree(tuple(tokens), tuple(parents))


def no_guess(request):
    return DraftTree()
