"""A stand-alone smaller model with a stack of its own that may lag; one of another vocabulary is in `other_words`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop
from outrider.drafters.grow import Grower, Line
from outrider.drafters.other_words import OtherWords
from outrider.errors import ModelError
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.models.heads import files
from outrider.models.heads.small import TrimmedModel
from outrider.models.heads.widen import open_artefact
from outrider.models.lexicon import first_difference
from outrider.models.loader import load
from outrider.models.seats import Crew, DeviceTree, Outline
from outrider.models.target import Target
from outrider.request import Request
from outrider.tree import DraftTree

WIDTH = 3
"""Nodes a level; they share the level's pass, and control decides how many of them pay in the target's."""


class SmallModel(Drafter):
    """Drafts by running its model ahead; the noise of its draws is the target's own (Leviathan et al., 2211.17192).

    From `observe` it learns only how its guesses fared: what it has not seen is in the request's tokens, and the next
    proposal runs them.

    Args:
        model: one of the target's vocabulary, or one that `outrider train` made, which speaks a part of it.
    """

    name = "small_model"

    def __init__(self, workshop: Workshop, model: Target | TrimmedModel) -> None:
        target, config = workshop.target, workshop.config
        self.model = model
        if isinstance(self.model, TrimmedModel):
            self._kept: Tensor | None = self.model.kept_ids
            stack, self.nbytes = self.model.stack, self.model.nbytes
        else:
            self._kept = None
            stack, self.nbytes = tuple(self.model.page_specs), 0 if self.model is target else self.model.nbytes
        self.needs = Needs(
            stack=stack,
            stack_dtype=self.model.page_dtype,
            scratch_levels=1,
            ranks=True,
            width=WIDTH,
            tokens_on_host=False,
        )
        self._kernels, self._acceptance, self._vocab_size = target.kernels, config.acceptance, target.vocab_size
        self._seen: dict[int, int] = {}

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        assert own_pages is not None
        model, pages = self.model, own_pages

        def run(batch: FlatBatch) -> Tensor:
            return model.logits(batch, pages) if isinstance(model, TrimmedModel) else model.forward(batch, pages).logits

        self._grower = Grower(run, self._kernels, self._acceptance, block_size, self._vocab_size, self._kept)
        self.trees = self._grower.trees

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self._grower.observe(commits)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        self._seen |= {ask.request.id: ask.request.num_tokens for ask in asks}
        return self._grower.grow(asks, [Line.of(ask, ask.seen) for ask in asks], self.model.device)

    def seen(self, request: Request) -> int | None:
        """Everything that was known when it last ran; what came since it runs when asked again."""
        return self._seen.pop(request.id, None)

    def end(self, request: Request) -> None:
        self._grower.end(request)

    def board(self, asks: Sequence[Ask], seats: Sequence[int]) -> None:
        self._grower.read(asks, self.model.device)

    def draft(self, crew: Crew, outline: Outline) -> DeviceTree:
        return self._grower.draft(crew, outline)


def small_model(workshop: Workshop) -> Drafter:
    """The drafter for the model that the settings lead to.

    `drafter_model` is any model, or one that `outrider train` made for the target. Without it, one that comes with the
    package serves; where there is none, the target itself, which is right for a test of exactness and never faster.

    Raises:
        ModelError: for one trained for another target; for one of another vocabulary, naming the first differing id,
            where nothing can be told from its ids.
    """
    target, config = workshop.target, workshop.config
    named = config.drafter_model
    trained = files.find(SmallModel.name, target) if named is None else files.trained(named)
    if trained is not None:
        return SmallModel(workshop, TrimmedModel(open_artefact(SmallModel.name, named, target), target))
    if named is None:
        return SmallModel(workshop, target)
    model = load(named, dtype=config.dtype, device=str(target.device), kernels=target.kernels)
    difference = first_difference(target.tokenizer, model.tokenizer)
    if difference is None:
        return SmallModel(workshop, model)
    try:
        return OtherWords(SmallModel.name, WIDTH, workshop, model)
    except ModelError as error:
        raise ModelError(
            f"the two models do not share a vocabulary ({difference}), and nothing can be guessed across: {error}; "
            "choose a drafter model of the target's own family"
        ) from error
