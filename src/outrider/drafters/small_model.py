"""A stand-alone smaller model of the same vocabulary, with a key-value stack of its own that may lag behind."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop
from outrider.drafters.grow import Grower
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.models.loader import load
from outrider.models.target import Target, same_vocabulary
from outrider.request import Request
from outrider.tree import DraftTree


class SmallModel(Drafter):
    """Drafts by running its model ahead; the noise of its draws is the target's own (Leviathan et al., 2211.17192).

    From `observe` it learns only how its guesses fared: what it has not seen is in the request's tokens, and the next
    proposal runs them.
    Without `drafter_model` it is the target itself, which is right for a test of exactness and never faster.

    Raises:
        ModelError: for a model of another vocabulary, naming the first differing id.
    """

    name = "small_model"

    def __init__(self, workshop: Workshop) -> None:
        target, config = workshop.target, workshop.config
        if config.drafter_model is None:
            self.model: Target = target
        else:
            self.model = load(
                config.drafter_model,
                dtype=config.dtype,
                device=str(target.device),
                kernels=config.kernels,
                threads=config.threads,
            )
            same_vocabulary(target.tokenizer, self.model.tokenizer)
        self.needs = Needs(
            stack=tuple(self.model.page_specs), stack_dtype=self.model.page_dtype, scratch_levels=1, ranks=True
        )
        self.nbytes = 0 if self.model is target else self.model.nbytes
        self._workshop = workshop
        self._seen: dict[int, int] = {}

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        assert own_pages is not None
        pages = own_pages
        self._grower = Grower(
            lambda batch: self.model.forward(batch, pages).logits,
            self._workshop.target.kernels,
            self._workshop.config.acceptance,
            block_size,
            self._workshop.target.vocab_size,
        )

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self._grower.observe(commits)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        self._seen |= {ask.request.id: ask.request.num_tokens for ask in asks}
        return self._grower.grow(asks, [ask.seen for ask in asks], self.model.device)

    def seen(self, request: Request) -> int | None:
        """Everything that was known when it last ran; what came since it runs when asked again."""
        return self._seen.pop(request.id, None)

    def end(self, request: Request) -> None:
        self._grower.end(request)
