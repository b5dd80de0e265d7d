"""The rejection rule: the same law as plain sampling, though not the same text.

Chains as Leviathan et al. (arXiv:2211.17192), siblings without replacement as Sequoia (arXiv:2402.12374). It holds
only if the number of a node's children was fixed before they were drawn and none was dropped afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.noise import Key, Purpose, coins, stream
from outrider.tree import ROOT, DraftTree, Verdict

Item = TypeVar("Item")
Laws = Callable[[Sequence[int], Sequence[int]], Tensor]
"""The target's laws at nodes (or `ROOT`) of trees that are given by number: (W, V) float64, each row summing to 1, or
all NaN where nothing can be drawn."""


CACHED, MOST = 2**21, 2**25
"""Bytes of laws that are worked on at once: on a CPU they shall stay in its cache, on a device be bounded."""


class Choices(Protocol):
    """The random part of walks; trees are given by number."""

    def accept(self, trees: Sequence[int], nodes: Sequence[int], ratios: Tensor) -> Tensor:
        """Whether these nodes are accepted, each with the chance min(1, ratio): (W,) float64 -> (W,) bool."""

    def pick(self, nodes: Sequence[int], weights: Tensor) -> Tensor:
        """A token a tree, drawn at these nodes from (R, V) float64 -> (R,) int64; -1 where a row is NaN."""


def verify_rejection(trees: Sequence[DraftTree], laws: Laws, choices: Choices) -> list[Verdict]:
    """Walk all the trees together; each child in turn is accepted or removed from the law.

    Every walk goes at its own pace, a coin a wave, and the host reads a wave's coins at once: a device is asked as
    often as the longest walk has coins, and once for what the target draws itself.

    Args:
        trees: their `laws` are what the siblings were drawn from, without replacement; None means point masses.
        laws: asked only for nodes reached. Where there is none, the walk ends and -1 is the verdict's last token.
    """
    walks = [_Walk(number, tree, tree.children(ROOT)) for number, tree in enumerate(trees)]
    if not walks:
        return []
    left = _Left(laws, walks)
    while tried := [walk for walk in walks if walk.untried]:
        numbers, children = [walk.number for walk in tried], [walk.untried[0] for walk in tried]
        hits = choices.accept(numbers, children, left.ratios(tried)).tolist()
        left.remove([walk for walk, hit in zip(tried, hits, strict=True) if not hit])
        for walk, hit in zip(tried, hits, strict=True):
            walk.tossed(hit)
        left.arrive([walk for walk, hit in zip(tried, hits, strict=True) if hit])
    drawn = choices.pick([walk.node for walk in walks], left.p).tolist()
    return [walk.verdict(token) for walk, token in zip(walks, drawn, strict=True)]


class KeyedChoices:
    """Choices by the noise of one cycle a tree, its key's position being the output position of the tree's root."""

    def __init__(self, trees: Sequence[DraftTree], keys: Sequence[Key]) -> None:
        nodes = range(max((len(tree) for tree in trees), default=0))
        streams = [stream(Purpose.RESIDUAL, ROOT)]
        for node in nodes:
            streams += [stream(Purpose.ACCEPT, node), stream(Purpose.RESIDUAL, node)]
        self._coins = coins(keys, streams)[:, :, 0]

    def accept(self, trees: Sequence[int], nodes: Sequence[int], ratios: Tensor) -> Tensor:
        """See `Choices.accept`."""
        places = 2 * np.array(nodes) + 1
        return sent(self._coins[np.array(trees), places], ratios.device) < ratios

    def pick(self, nodes: Sequence[int], weights: Tensor) -> Tensor:
        """See `Choices.pick`."""
        places = 2 * np.array(nodes) + 2
        return invert(weights, sent(self._coins[np.arange(len(nodes)), places], weights.device))


def draft_siblings(laws: Tensor, nums: Sequence[int], keys: Sequence[Key], nodes: Sequence[int]) -> Tensor:
    """Draw children of P nodes from their laws, without replacement, in the order in which they are tried.

    laws: (P, V) of any scale, the very rows that go into `DraftTree.laws`. nums: how many are wanted of each, fixed
    before anything is drawn; every child drawn must enter the tree. keys (position: the output position of the cycle's
    root) and nodes (the parent's index, or `ROOT`) are what the draw depends on -> (P, max(nums)) int64, -1 behind the
    last child. Fewer come where a law has fewer tokens; none where it holds a NaN.
    """
    most = max(nums)
    uniforms = coins(keys, [[stream(Purpose.DRAFT, node)] for node in nodes], most)[:, 0]
    # Those that want most first: the others' rows are left out as soon as they have all of theirs.
    order = np.argsort(-np.array(nums), kind="stable")
    places = sent(order, laws.device)
    weights = laws.index_select(0, places).to(torch.float64)
    lawless = ~torch.isfinite(weights.sum(dim=1, keepdim=True))
    coins_sent = sent(uniforms[order], laws.device)
    drawn = torch.full((len(nums), most), -1, device=laws.device)
    for sibling in range(most):
        wanting = weights[: sum(num > sibling for num in nums)]
        tokens = invert(wanting, coins_sent[: len(wanting), sibling])
        drawn[: len(wanting), sibling] = tokens
        wanting.scatter_(1, tokens.clamp(min=0)[:, None], 0.0)
    return torch.empty_like(drawn).index_copy_(0, places, drawn.masked_fill_(lawless, -1))


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which a row's running sum passes its share of the total; never one of weight 0.

    weights: (W, V) float64; uniforms: (W,) float64 in (0, 1) -> (W,) int64, -1 where nothing is left, or a NaN is.
    """
    # A sum made in parallel may fall by rounding; tokens of weight 0 are not looked at.
    mass = torch.where(weights <= 0, -torch.inf, weights.cumsum(1))
    total = mass.amax(dim=1, keepdim=True)
    # The product may round up to the total itself.
    share = torch.minimum(total * uniforms[:, None], total.nextafter(torch.zeros_like(total)))
    tokens = (mass > share).to(torch.uint8).argmax(dim=1)
    return torch.where(total[:, 0] > 0, tokens, -1)


@dataclass(slots=True)
class _Walk:
    """How far the walk through one tree has come, and which children of that node were not tried yet."""

    number: int
    tree: DraftTree
    untried: list[int]
    node: int = ROOT
    path: list[int] = field(default_factory=list)

    @property
    def token(self) -> int:
        """Of the child that is tried next."""
        return self.tree.tokens[self.untried[0]]

    def tossed(self, hit: bool) -> None:
        child = self.untried.pop(0)
        if hit:
            self.node = child
            self.path.append(child)
            self.untried = self.tree.children(child)

    def verdict(self, drawn: int) -> Verdict:
        return Verdict(tuple(self.path), (*(self.tree.tokens[node] for node in self.path), drawn))


class _Left:
    """What is left of the laws at each walk's node, once the children tried there are removed.

    Attributes:
        p: the target's, (R, V) float64. q: the drafter's, likewise, a row of zeros where the children are point masses
            or it has none of that tree; None as long as no tree has any.
    """

    def __init__(self, laws: Laws, walks: Sequence[_Walk]) -> None:
        self._laws = laws
        self.p = laws(range(len(walks)), [ROOT] * len(walks))
        self.q: Tensor | None = None
        self._arrive_drafted(walks)

    def ratios(self, walks: Sequence[_Walk]) -> Tensor:
        """p / q of the child that each tries next: (W,) float64."""
        rows, tokens = self._rows(walks), self._ids([walk.token for walk in walks])
        p = self.p[rows, tokens]
        if self.q is None:
            return p
        q = self.q[rows, tokens]
        return p / torch.where(q > 0, q, 1.0)

    def remove(self, walks: Sequence[_Walk]) -> None:
        """The child that each tried was refused."""
        if not walks:
            return
        rows, tokens = self._rows(walks), self._ids([walk.token for walk in walks])[:, None]
        p = self._of(self.p, rows)
        rest = p.clone() if self.q is None else (p - self._of(self.q, rows)).clamp_(min=0.0)
        rest.scatter_(1, tokens, 0.0)  # a point mass takes its token away, a law has done so already
        total = rest.sum(dim=1, keepdim=True)
        # Nothing is left by rounding alone.
        self.p = self._put(self.p, rows, torch.where(total > 0, rest.div_(total), p))
        going_on = [index for index, walk in enumerate(walks) if len(walk.untried) > 1]
        if self.q is not None and going_on:
            if len(going_on) < len(walks):
                places = self._ids(going_on)
                rows, tokens = rows[places], tokens[places]
            q = self._of(self.q, rows).scatter_(1, tokens, 0.0)
            total = q.sum(dim=1, keepdim=True)
            self.q = self._put(self.q, rows, q.div_(torch.where(total > 0, total, 1.0)))

    def arrive(self, walks: Sequence[_Walk]) -> None:
        """These walks have come to another node."""
        if walks:
            numbers, nodes = [walk.number for walk in walks], [walk.node for walk in walks]
            self.p = self._put(self.p, self._rows(walks), self._laws(numbers, nodes))
            self._arrive_drafted(walks)

    def _arrive_drafted(self, walks: Sequence[_Walk]) -> None:
        """What the children were drawn from.

        A law that holds a NaN, or could not have drawn one of the children, was not drawn from. Point masses are exact
        for any guesses that were chosen without the noise of this walk.
        """
        walks = [walk for walk in walks if walk.untried and walk.tree.laws is not None]
        if not walks:
            return
        laws = torch.stack([walk.tree.laws[walk.untried[0]] for walk in walks if walk.tree.laws is not None])
        q = laws.to(self.p.device, torch.float64)
        most = max(len(walk.untried) for walk in walks)
        # Walks of fewer children name their first again.
        children = [walk.untried + walk.untried[:1] * (most - len(walk.untried)) for walk in walks]
        tokens = [walk.tree.tokens[child] for walk, here in zip(walks, children, strict=True) for child in here]
        total = q.sum(dim=1, keepdim=True)
        drawable = (q.gather(1, self._ids(tokens).view(-1, most)) > 0).all(dim=1, keepdim=True)
        # x / inf is 0, NaN where x is infinite: a row without a law becomes one of zeros.
        q.div_(torch.where(torch.isfinite(total) & drawable, total, torch.inf)).nan_to_num_(nan=0.0)
        if self.q is None and len(q) < len(self.p):
            self.q = torch.zeros_like(self.p)
        self.q = q if self.q is None else self._put(self.q, self._rows(walks), q)

    @staticmethod
    def _of(laws: Tensor, rows: Tensor) -> Tensor:
        """Some rows, which are not copied where they are all."""
        return laws if len(rows) == len(laws) else laws[rows]

    @staticmethod
    def _put(laws: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """The laws with these in place of some; rows ascend."""
        if len(rows) == len(laws):
            return values
        laws[rows] = values
        return laws

    def _rows(self, walks: Sequence[_Walk]) -> Tensor:
        return self._ids([walk.number for walk in walks])

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return sent(np.array(ids), self.p.device)


def parts(items: Sequence[Item], vocab_size: int, device: torch.device) -> list[Sequence[Item]]:
    """The items in parts whose laws, one (V,) float64 each, may be worked on at once."""
    size = max(1, (CACHED if device.type == "cpu" else MOST) // (8 * vocab_size))
    return [items[first : first + size] for first in range(0, len(items), size)]


def sent(values: NDArray[Any], device: torch.device) -> Tensor:
    """The numbers on a device, which nobody waits for."""
    return torch.from_numpy(values).to(device, non_blocking=True)
