"""Which tokens a model-like drafter proposes at a node: the law's own best under the very noise the target will use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.weights import Q_STEPS, Weights, noisy_chance
from outrider.errors import RequestError
from outrider.kernels.base import Kernels
from outrider.kernels.parcel import send
from outrider.sampling.context import Context, Row
from outrider.sampling.rejection import draft_siblings, parts
from outrider.sampling.rows import warp_rows
from outrider.sampling.warp import laws, warp
from outrider.tree import DraftTree

Keys = tuple[Tensor, Tensor, Tensor, Tensor]
COLD = (0.0, 0, 0, 0)
"""Temperature, seed, sample and position of a row that is drawn without noise."""
KEYS = 16
"""Sets of keys that are kept: levels of few requests repeat theirs, and making them costs as much as ranking."""


class Candidate(NamedTuple):
    """A child to be.

    Attributes:
        weight: chance in (0, 1] that the target's token is this one, given that the path down to its parent holds.
        prior, rank, cell: what `table` learns by, once it is known whether it was; no table where nobody asked.
    """

    token: int
    weight: float = 1.0
    prior: float = 1.0
    rank: int = 0
    cell: int = 0
    table: Weights | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where candidates are wanted: after a request's known tokens and the tokens of a path through its tree."""

    context: Context
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Output position of the candidates."""
        return self.context.position + len(self.path)

    @property
    def warps(self) -> bool:
        return self.context.warps(self.position)

    def row(self) -> Row:
        return self.context.rows(DraftTree.chain(self.path))[-1]


class Candidates:
    """Ranks candidates for a drafter's rows of logits, and keeps the tables of how such candidates fared.

    Logits are (A, V_d) float32. Column c stands for the target's token `kept[c]`, or `c` itself where `kept` is None;
    tokens without a column are never proposed, columns beyond the target's vocabulary are cut off.

    Args:
        kept: (V_d,) ascending token ids of a trimmed vocabulary. rates: by depth and rank, chances that were measured
            beforehand; without noise they are the prior in place of q, which then only corrects them.
    """

    def __init__(
        self,
        kernels: Kernels,
        vocab_size: int,
        kept: Tensor | None = None,
        rates: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._rates = rates
        self._kept = None if kept is None else kept.to(torch.int64)
        self._ids: list[int] | None = None if kept is None else kept.tolist()
        self._keys = lru_cache(maxsize=KEYS)(_keys)
        self._greedy, self._noisy, self._drawn = Weights(Q_STEPS), Weights(Q_STEPS), Weights(Q_STEPS)

    def first(self, logits: Tensor, places: Sequence[Place]) -> list[list[Candidate]]:
        """The one best candidate a row, its weight left at 1: for chains that nobody weighs."""
        if self._kept is not None and any(place.context.temperature for place in places):
            return self.best(logits, places, 1)
        logits = self._warped(logits, places)
        columns: list[int] = self._kernels.draw(logits, *self._keys_of(places, logits.device)).tolist()
        return [[Candidate(self._token(column))] if column >= 0 else [] for column in columns]

    def best(
        self, logits: Tensor, places: Sequence[Place], width: int, trust: Sequence[float] | None = None
    ) -> list[list[Candidate]]:
        """The `width` likeliest draws of the target a row, if the drafter's law were the target's, likeliest first.

        Under the match rule draft and target share their noise, so they are the top of `log q / T + g`. Rows without a
        law get none. trust: a factor of each row's priors, from a drafter that doubts itself.
        """
        logits = self._warped(logits, places)
        # One more than wanted: a leader's lead is the evidence.
        keys = self._keys_of(places, logits.device)
        ranked = self._kernels.rank(logits, width + 1, *keys, self._ids_on(logits.device))
        scores, columns, masses = (found.tolist() for found in ranked)
        logs: list[list[float]] = []
        temperatures = [place.context.temperature for place in places]
        if any(temperatures):
            scale = None if all(temperature == 1.0 for temperature in temperatures) else keys[0]
            logs = _log_chances(logits, ranked[1], scale).tolist()
        found = []
        for index, place in enumerate(places):
            doubt = 1.0 if trust is None else trust[index]
            depth = len(place.path) + 1
            ranks = [(s, c) for s, c in zip(scores[index], columns[index], strict=True) if c >= 0]
            if place.context.temperature:
                found.append(self._by_gap(ranks, logs[index], depth, width, doubt))
            else:
                found.append(self._by_chance(ranks, masses[index], depth, width, doubt))
        return found

    def draw(
        self,
        logits: Tensor,
        places: Sequence[Place],
        nums: Sequence[int],
        nodes: Sequence[int],
        trust: Sequence[float] | None = None,
    ) -> list[tuple[list[Candidate], Tensor]]:
        """`nums` children of each of `nodes` from the drafter's law without replacement, in the order drawn; that law.

        A law is (V,) float32; no children where there is none. For the rejection rule: `nums` must not depend on these
        children, and every child must enter the tree. trust: as in `best`.
        """
        found = []
        for part in parts(range(len(places)), self._vocab_size, logits.device):
            q = self._laws(logits[part[0] : part[-1] + 1], [places[row] for row in part])
            contexts = [places[row].context for row in part]
            keys = [(context.request.seed, context.request.sample, context.position) for context in contexts]
            tokens = draft_siblings(q, [nums[row] for row in part], keys, [nodes[row] for row in part])
            chances = q.gather(1, tokens.clamp(min=0))
            told = torch.stack((tokens.to(torch.float64), chances.to(torch.float64))).tolist()  # the host asks but once
            for row, law_, drawn, qs in zip(part, q, *told, strict=True):
                doubt, depth = 1.0 if trust is None else trust[row], len(places[row].path) + 1
                found.append((self._by_draw(drawn, qs, depth, doubt), law_))
        return found

    def rate(self, rank: int) -> float:
        """Mean chance that the child drawn as number `rank` is accepted."""
        return self._drawn.rate(rank)

    def _laws(self, logits: Tensor, places: Sequence[Place]) -> Tensor:
        """The drafter's laws over the target's vocabulary: (P, V) float32, all NaN where a row has none."""
        weights = self._full(logits[:, : self._vocab_size])
        warped = [row for row, place in enumerate(places) if place.warps]
        if warped and weights.data_ptr() == logits.data_ptr():
            weights = weights.clone()
        _warp(weights, warped, [places[row] for row in warped])
        return laws(weights, [place.context.temperature for place in places]).to(torch.float32)

    def _by_draw(self, tokens: Sequence[float], chances: Sequence[float], depth: int, doubt: float) -> list[Candidate]:
        """Of drawn children q is the prior."""
        candidates = []
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            if token >= 0:
                prior = doubt * chance
                weight, cell = self._drawn.weigh(chance, prior, rank, depth)
                candidates.append(Candidate(int(token), weight, prior, rank, cell, self._drawn))
        return candidates

    def _by_chance(
        self, ranked: Sequence[tuple[float, int]], mass: float, depth: int, width: int, doubt: float
    ) -> list[Candidate]:
        """Without noise q ranks, and is the prior."""
        candidates = []
        for rank, (score, column) in enumerate(ranked[:width]):
            chance = math.exp(min(0.0, score - mass))
            if chance > 0.0:
                prior = doubt * (self._rate(depth, rank) or chance)
                weight, cell = self._greedy.weigh(chance, prior, rank, depth)
                candidates.append(Candidate(self._token(column), weight, prior, rank, cell, self._greedy))
        return candidates

    def _rate(self, depth: int, rank: int) -> float:
        """What was measured beforehand; 0 where nothing was."""
        rates = self._rates[depth - 1] if self._rates and depth <= len(self._rates) else ()
        return rates[rank] if rank < len(rates) else 0.0

    def _by_gap(
        self, ranked: Sequence[tuple[float, int]], logs: Sequence[float], depth: int, width: int, doubt: float
    ) -> list[Candidate]:
        """Under the noise the distance between perturbed scores is the evidence, and the chance without it."""
        candidates = []
        for rank, (score, column) in enumerate(ranked[:width]):
            # The leader's gap is to the runner-up, the others' to the leader.
            gap = ranked[0][0] - score if rank else score - ranked[1][0] if len(ranked) > 1 else math.inf
            chance = noisy_chance(gap, logs[rank], rank)
            prior = doubt * chance
            weight, cell = self._noisy.weigh(chance, prior, rank, depth)
            candidates.append(Candidate(self._token(column), weight, prior, rank, cell, self._noisy))
        return candidates

    def _keys_of(self, places: Sequence[Place], device: torch.device) -> Keys:
        """See `_keys`; without noise a row has no key, so that all such levels share theirs."""
        rows = []
        for place in places:
            context = place.context
            warm = context.temperature > 0
            rows.append(
                (context.temperature, context.seed_bits, context.request.sample, place.position) if warm else COLD
            )
        return self._keys(tuple(rows), device)

    def _ids_on(self, device: torch.device) -> Tensor | None:
        """The columns' tokens, where the logits are."""
        if self._kept is not None and self._kept.device != device:
            self._kept = self._kept.to(device)
        return self._kept

    def _warped(self, logits: Tensor, places: Sequence[Place]) -> Tensor:
        """The weights of every row over the drafter's columns; the very logits where no request warps."""
        logits = logits[:, : self._vocab_size]
        warped = [i for i, place in enumerate(places) if place.warps]
        if not warped:
            return logits
        logits = logits.clone()
        weights = self._full(logits[warped])
        _warp(weights, range(len(warped)), [places[i] for i in warped])
        logits[warped] = weights[:, : logits.shape[1]] if self._kept is None else weights[:, self._kept]
        return logits

    def _full(self, logits: Tensor) -> Tensor:
        """(..., V_d) -> (..., V), -inf for tokens that the drafter lacks."""
        if logits.shape[-1] == self._vocab_size and self._kept is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self._vocab_size), -math.inf)
        full[..., slice(logits.shape[-1]) if self._kept is None else self._ids_on(logits.device)] = logits
        return full

    def _token(self, column: int) -> int:
        return column if self._ids is None else self._ids[column]


def _keys(rows: tuple[tuple[float, int, int, int], ...], device: torch.device) -> Keys:
    """Temperature, seed, sample and position of every row, as the keyed draw takes them."""
    temperatures, seeds, samples, positions = zip(*rows, strict=True)
    arrays = (
        np.array(temperatures, dtype=np.float32),
        np.array(seeds, dtype=np.int64),
        np.array(samples, dtype=np.int32),
        np.array(positions, dtype=np.int32),
    )
    heat, seed, sample, position = send(arrays, device)
    return heat, seed, sample, position


def _log_chances(logits: Tensor, columns: Tensor, temperatures: Tensor | None) -> Tensor:
    """log q of some columns (A, K) of each row at its temperature (A,), of those at temperature 0 as at 1: (A, K).

    temperatures: None where all are 1.
    """
    if temperatures is not None:
        logits = logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    return torch.log_softmax(logits, dim=1).gather(1, columns.clamp(min=0))


def _warp(weights: Tensor, at: Sequence[int], places: Sequence[Place]) -> None:
    """Warp rows `at` of the weights (P, V) in place, by the kernels that the requests have, all of these in one call.

    Nothing can be drawn where a request is at fault, which the target's own draw will tell it.
    """
    rows = {index: place.row() for index, place in zip(at, places, strict=True)}
    quick = [index for index, row in rows.items() if row.context.warper and not row.context.params.automaton]
    if quick:
        warper = rows[quick[0]].context.warper
        assert warper is not None
        weights[quick] = warp_rows(warper, weights, quick, [rows[index] for index in quick])
    for index in rows.keys() - set(quick):
        try:
            weights[index] = warp(weights[index], rows[index])
        except RequestError:
            weights[index] = -math.inf
