"""What every rank but the first does: its part of whatever rank 0 orders, until the job is over."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from outrider.cache.pages import Pages
from outrider.errors import OutriderError
from outrider.kernels.base import Kernels, KeyIndex
from outrider.kernels.tree import Trees, Walks
from outrider.models.device_memory import free_memory
from outrider.models.ranks.group import Ranks
from outrider.models.ranks.part import Part, Wanted, part_of

Sizes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Follower:
    """This rank's parts of models and stacks, by number; a verb is a method of its name.

    It decides nothing: which pass runs, and over what, is said by rank 0 alone.
    """

    ranks: Ranks
    parts: dict[int, Part] = field(default_factory=dict)
    stacks: dict[int, tuple[Pages, Kernels]] = field(default_factory=dict)

    def serve(self) -> None:
        """Carry out orders until the last one."""
        while True:
            dropped, verb, *words = self.ranks.hear()
            for number in dropped:
                self.parts.pop(number, None)
                self.stacks.pop(number, None)
            if verb == "end":
                return
            self.obey(verb, *words)

    @torch.inference_mode()
    def obey(self, verb: str, *words: Any) -> None:
        verbs: dict[str, Callable[..., None]] = {
            "load": self.load,
            "pages": self.pages,
            "pass": self.run,
            "compact": self.compact,
            "follow": self.follow,
            "memory": self.memory,
        }
        verbs[verb](*words)

    def load(self, number: int, wanted: Wanted) -> None:
        part = part_of(wanted, self.ranks)
        if isinstance(part, Part):
            self.parts[number] = part

    def pages(self, number: int, model: int, num_slots: int, num_layers: int, dtype: torch.dtype) -> None:
        part: Part = self.parts[model]
        error: Exception | None = None
        try:
            specs = part.body.page_specs[:num_layers]
            self.stacks[number] = Pages(specs, num_slots, dtype, self.ranks.device), part.kernels
        except RuntimeError as caught:
            error = caught
        self.ranks.agree(error)

    def run(
        self,
        model: int,
        stack: int,
        sizes: Sizes,
        block_size: int,
        num_layers: int | None,
        taps: tuple[int, ...],
        graphs: int,
    ) -> None:
        tokens, positions, slots, *index = self.ranks.take(sizes)
        tables, request, linear, tails, length, *asked = index
        keys = KeyIndex(tables, request, linear, tails, length, block_size)
        rows = asked[0].long() if asked else None
        part = self.parts[model]
        part.kernels.graph_pool.limit = graphs
        pages, _ = self.stacks[stack]
        part.body.forward(tokens.long(), positions, slots, keys, pages, rows, num_layers, taps)

    def compact(self, stack: int, source: list[int], target: list[int]) -> None:
        self.stacks[stack][0].compact(source, target)

    def follow(self, stack: int, sizes: Sizes, most_nodes: int, depth: int) -> None:
        slots, tokens, parents, first, starts, counts, paths, said = self.ranks.take(sizes)
        pages, kernels = self.stacks[stack]
        trees = Trees(tokens.long(), parents, first, starts, most_nodes, depth)
        pages.follow(kernels, slots, trees, Walks(counts, paths, said.long()))

    def memory(self) -> None:
        self.ranks.least(free_memory(self.ranks.device))


def follow(ranks: Ranks, parts: Mapping[int, Part] = MappingProxyType({})) -> NoReturn:
    """Serve rank 0, and end this process when the job is over.

    parts: that are here already, by the number under which rank 0 knows them.

    Raises:
        SystemExit: always.
    """
    try:
        Follower(ranks, dict(parts)).serve()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:  # whatever it is, the others wait for this rank and must learn it
        if not isinstance(error, OutriderError):
            traceback.print_exc(file=sys.__stderr__)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        ranks.fail(lines[0])
        raise SystemExit(1) from error
    ranks.part()
    raise SystemExit(0)
