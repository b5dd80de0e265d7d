"""A small model of another tokenizer: it reads the text in its own words, and guesses those that the target has too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.cache.blocks import BlockPool
from outrider.cache.ledger import Ledger
from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop
from outrider.drafters.grow import Grower, Line
from outrider.drafters.retold import Retold
from outrider.errors import ModelError
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.models.lexicon import Lexicon, shared
from outrider.models.target import Target
from outrider.request import Request
from outrider.tree import EMPTY_TREE, DraftTree


@dataclass(slots=True)
class _Text:
    """A request's text as the drafter reads it, and how many of the target's tokens it was told."""

    retold: Retold
    told: int = 0


class OtherWords(Drafter):
    """Drafts with a model of another vocabulary by token-level intersection (TLI; Timor et al., 2502.05202).

    Its law is restricted to tokens that stand for the same bytes as a token of the target's, whose ids they get: one
    guess is one token of the target, at that token's position. So the tree, the match rule, the noise that both share
    and, under the rejection rule, the law that a guess was drawn from, are those of any drafter that knows a part of
    the vocabulary.

    The text is a second sequence, with a ledger of its own over a stack of its own: ids, their number and so their
    slots are not the target's. When the text grows, its end is tokenized anew, and keys from the first id that changed
    are rolled back. Where its slots or positions do not suffice, or the text ends within a character that it cannot
    say, it is silent.

    Raises:
        ModelError: for a tokenizer whose ids do not stand for bytes, or where the two share no token.
    """

    def __init__(self, name: str, width: int, workshop: Workshop, model: Target) -> None:
        target = workshop.target
        self.name, self.model, self.nbytes = name, model, model.nbytes
        self.needs = Needs(stack=tuple(model.page_specs), stack_dtype=model.page_dtype, ranks=True, width=width)
        self._words = Lexicon(target.tokenizer, target.vocab_size)
        self._own_words = Lexicon(model.tokenizer, model.vocab_size)
        self.kept, columns = shared(self._words, self._own_words)
        if not len(self.kept):
            raise ModelError("the two vocabularies have no token in common")
        self.notes = (
            f"{name} is of another tokenizer: it can guess {len(self.kept):,} of the target's {target.vocab_size:,} "
            "tokens",
        )
        self._columns = columns.to(model.device)
        self._ids = dict(zip(self.kept.tolist(), columns.tolist(), strict=True))
        self._kernels, self._vocab_size = target.kernels, target.vocab_size
        self._acceptance, self._prefix_cache = workshop.config.acceptance, workshop.config.prefix_cache
        self._texts: dict[int, _Text] = {}

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        assert own_pages is not None
        model, pages = self.model, own_pages

        def run(batch: FlatBatch) -> Tensor:
            return model.forward(batch, pages).logits.index_select(1, self._columns)

        self.ledger = Ledger(BlockPool(pages.num_slots // block_size, block_size), (), self._prefix_cache)
        self._grower = Grower(
            run, self._kernels, self._acceptance, block_size, self._vocab_size, self.kept, spelled=self._ids
        )
        self.trees = self._grower.trees

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self._grower.observe(commits)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        lines = {index: line for index, ask in enumerate(asks) if (line := self._line(ask)) is not None}
        if not lines:
            return [EMPTY_TREE] * len(asks)
        found = self._grower.grow([asks[index] for index in lines], list(lines.values()), self.model.device)
        trees = dict(zip(lines, found, strict=True))
        for index, line in lines.items():
            key = self._key(asks[index].request)
            self.ledger.draft(key, line.known - line.start)
            self.ledger.commit(key, self._texts[key[0]].retold.ids, line.known)
        return [trees.get(index, EMPTY_TREE) for index in range(len(asks))]

    def end(self, request: Request) -> None:
        self._grower.end(request)
        if self._texts.pop(request.id, None) is not None and (key := self._key(request)) in self.ledger:
            self.ledger.close(key)

    def _key(self, request: Request) -> tuple[int, str]:
        return request.id, self.name

    def _line(self, ask: Ask) -> Line | None:
        """The text as it is now, with slots for it and for guesses; None where there is nothing to say."""
        request, key = ask.request, self._key(ask.request)
        text = self._texts.setdefault(request.id, _Text(Retold(self._words, self._own_words)))
        same = text.retold.extend(request.tokens(text.told, request.num_tokens))
        text.told = request.num_tokens
        ids = text.retold.ids
        known = len(ids)
        if key in self.ledger:
            self.ledger.roll_back(key, min(same, max(0, known - 1)))  # the last one runs: its logits are wanted
        elif known:
            self.ledger.open(key, ids)
        if not known or not text.retold.says_end or known + ask.budget.depth > self.model.max_positions:
            return None
        scratch = ask.budget.width * (ask.budget.depth - 1)
        if not self.ledger.reserve(key, known + scratch):
            return None
        start = self.ledger[key].committed
        slots = self.ledger.slots(key, known, known + scratch)
        return Line(self.ledger[key].table, start, known, tuple(ids[start:]), tuple(slots))
