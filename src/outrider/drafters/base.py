"""The door of a drafter: its verbs, with defaults, and a frozen statement of what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.cache.pages import Pages, PageSpec
from outrider.errors import DrafterError
from outrider.kernels.tree import Walks
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.models.seats import Crew, DeviceTree, Outline, TreeRows
from outrider.request import Request
from outrider.sampling.context import Context
from outrider.tree import Budget, DraftTree, counted

if TYPE_CHECKING:
    import torch

    from outrider.config import EngineConfig
    from outrider.models.target import Target


@dataclass(frozen=True, slots=True)
class Needs:
    """What the engine must hold ready for a drafter.

    Attributes:
        stack: layers of the drafter's own key-value stack (empty: none). stack_dtype: its element type.
        scratch_levels: levels of guesses whose keys the drafter writes, counted back from the tree's depth (1: every
            level but the last); each level has slots for `width` of them. None: no scratch slots at all.
        scratch_chain: each of those levels takes one slot, whatever the width (a block drafter's rows).
        scratch_least: slots that are needed whatever the depth.
        ranks: it ranks its guesses, and stops where none is worth its price (`Budget.prices`). width: most
            children of one node where the user set none.
        target_layers: the drafter runs the target's layers [0, n) on its own rows. taps: layers whose hidden states
            `observe` wants. extra_rows: most probe rows it adds to a pass, for one request (`Drafter.probe`).
        tokens_on_host: it reads the tokens themselves, so that a cycle cannot be launched before the last is read. One
            that does not has the verbs of the device too (`Drafter.draft`). levels: most that it guesses there.
    """

    stack: tuple[PageSpec, ...] = ()
    stack_dtype: torch.dtype | None = None
    scratch_levels: int | None = None
    scratch_chain: bool = False
    scratch_least: int = 0
    ranks: bool = False
    width: int = 1
    target_layers: int | None = None
    taps: tuple[int, ...] = ()
    extra_rows: int = 0
    tokens_on_host: bool = True
    levels: int | None = None

    def num_scratch(self, depth: int, width: int) -> int:
        """Scratch slots for one request's guesses."""
        if self.scratch_levels is None or depth < 1:
            return 0
        return max(self.scratch_least, max(0, depth - self.scratch_levels) * (1 if self.scratch_chain else width))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request's question to the drafter.

    Attributes:
        request: read only. context: its side of sampling, for drafters that draw. budget: at most this.
        table: its block table (slots of known tokens, in the target's and in the drafter's stack alike).
        seen: leading tokens whose keys the drafter's own stack holds; it may lag by any number.
        scratch: slots for the drafter's guesses, `Needs.num_scratch` of them.
    """

    request: Request
    context: Context
    budget: Budget
    table: Sequence[int] = ()
    seen: int = 0
    scratch: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """What one pass settled about one request.

    Attributes:
        request: read only; its output holds the new tokens already. num_new: how many the pass delivered.
        start: position of the first of `rows`. rows: rows of the batch (and of its taps) that are committed now,
            at positions `start`, `start + 1`, ...: known tokens, then the accepted path.
        table: its block table. seen: leading tokens whose keys the drafter's own stack held before this pass.
        probes: rows of the pass's logits that belong to the request's probes, node by node.
    """

    request: Request
    num_new: int
    start: int
    rows: tuple[int, ...]
    table: Sequence[int] = ()
    seen: int = 0
    probes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a drafter is built from: the target and the settings."""

    target: Target
    config: EngineConfig


class Drafter:
    """Guesses the next tokens. It never touches the ledger, never draws the final token, never knows the engine.

    A new drafter inherits from this class and writes `name`, `needs` and `propose`; the other verbs do nothing unless
    it needs them. Whatever it does wrong harms no text: it is told once, and asked no more (`engine/guard.py`).
    """

    name: str
    needs: Needs = Needs()
    nbytes: int = 0
    """Bytes of its own weights."""
    notes: tuple[str, ...] = ()
    """What a user should know of it."""

    def __init__(self, workshop: Workshop) -> None:
        """Built once, before any request; keeps nothing of the workshop by itself."""

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        """Where keys live; called once, before any request."""

    def begin(self, request: Request) -> None:
        """A request starts (again, after a preemption)."""

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        """Sees every target pass, prefill included, with what it settled about each request of it."""

    def grade(self, request: Request) -> int | None:
        """How sure it is of its next guess, told before the budget is set: the length of a match, say. 0: it would not
        guess at all; None: it cannot tell.
        """
        return None

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """One tree an ask, within its budget; an empty tree where it has nothing to say."""
        raise NotImplementedError(f"{type(self).__name__} must write propose(asks)")

    def probe(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """One tree an ask that the target only looks at: its rows share the pass, nothing is verified, and `observe`
        gets their logits (`Commit.probes`). Asked only of a drafter that needs `extra_rows`, where they are spare.
        """
        raise NotImplementedError(f"{type(self).__name__} must write probe(asks)")

    def seen(self, request: Request) -> int | None:
        """Leading tokens whose keys its own stack holds by now, told after `observe`; None: as many as before."""
        return None

    def end(self, request: Request) -> None:
        """A request is over, or loses its slots."""

    # The verbs of the device: for drafters that need no token on the host. They enqueue operations of fixed shapes and
    # never wait for one; a cycle of them may be replayed as a graph.

    def seat(self, num_seats: int, levels: int) -> None:
        """Make room for what it keeps of each seat; called once, before any request. levels: most of a guess."""

    def seat_bytes(self, levels: int) -> int:
        """What `seat` takes of the device for each seat, for the memory plan."""
        return 0

    def board(self, asks: Sequence[Ask], seats: Sequence[int]) -> None:
        """Requests sit down: read all that they say but the last token. Their budgets are empty."""

    def draft(self, crew: Crew, outline: Outline) -> DeviceTree:
        """The crew's trees, from what their last cycle brought (`Crew.news`), which it reads first."""
        raise NotImplementedError(f"{type(self).__name__} must write draft(crew, outline), or need tokens_on_host")

    def follow(self, crew: Crew, rows: TreeRows, output: TargetOutput, walks: Walks) -> None:
        """Sees the target's pass over `rows` and how far each walk went; the crew is as it was before."""

    def read(self, crew: Crew, outline: Outline) -> None:
        """Reads what the last cycles brought, where nothing is to be guessed; asked of a drafter fed from taps."""

    def keep(self, crew: Crew, rows: TreeRows, output: TargetOutput, walks: Walks) -> None:
        """As `follow`, of a cycle that neither guessed nor read: its token comes behind what is yet to be read."""

    def leave(self, request: Request, seat: int, unread: int) -> None:
        """A request stands up and goes on by way of the host; its last `unread` known tokens were not read yet."""


def made(kind: Callable[[Workshop], Drafter], workshop: Workshop) -> Drafter:
    """A drafter of this kind.

    Raises:
        DrafterError: where it lacks what every drafter must have.
    """
    drafter = kind(workshop)
    found = type(drafter)
    if not getattr(drafter, "name", None):
        raise DrafterError(f"{found.__name__} has no name: give the class the one that it has in the registry")
    if found.propose is Drafter.propose:
        raise DrafterError(f"{found.__name__} must write propose(asks)")
    if drafter.needs.extra_rows and found.probe is Drafter.probe:
        raise DrafterError(f"{found.__name__} must write probe(asks), as it needs extra_rows")
    if not drafter.needs.tokens_on_host and found.draft is Drafter.draft:
        raise DrafterError(f"{found.__name__} must write draft(crew, outline), or need tokens_on_host")
    return drafter


def graded(drafter: Drafter, request: Request) -> int | None:
    """How sure a drafter is of its next guess.

    Raises:
        DrafterError: where that is no grade.
    """
    grade = drafter.grade(request)
    if grade is not None and (type(grade) is not int or grade < 0):
        raise DrafterError(f"drafter {drafter.name!r} graded its guess {grade!r}: give an int from 0 on, or None")
    return grade


def one_each(name: str, asks: Sequence[Ask], trees: Any) -> list[DraftTree]:
    """What the drafter of that name answered.

    Raises:
        DrafterError: where it is not one tree an ask.
    """
    if not isinstance(trees, (list, tuple)):
        raise DrafterError(f"drafter {name!r} returned {_kind(trees)} for {counted(len(asks), 'ask')}: return a list")
    if len(trees) != len(asks):
        raise DrafterError(f"drafter {name!r} returned {counted(len(trees), 'tree')} for {counted(len(asks), 'ask')}")
    for tree in trees:
        if not isinstance(tree, DraftTree):
            raise DrafterError(f"drafter {name!r} returned {_kind(tree)} for an ask; DraftTree() says nothing")
    return list(trees)


def lawful(name: str, asks: Sequence[Ask], trees: Any, vocab_size: int) -> list[DraftTree]:
    """What the drafter of that name answered, looked at before anything is built on it.

    Raises:
        DrafterError: where it is not one lawful tree an ask, within its budget.
    """
    answers = one_each(name, asks, trees)
    for ask, tree in zip(asks, answers, strict=True):
        fault = tree.fault(vocab_size)
        if fault is not None:
            raise DrafterError(f"drafter {name!r}: {fault}")
        budget = ask.budget
        if len(tree) > budget.nodes:
            over = f"{counted(len(tree), 'node')} where its budget allows {budget.nodes}"
            raise DrafterError(f"drafter {name!r} proposed {over}")
        if len(tree) > budget.depth and (depth := max(tree.depths())) > budget.depth:
            over = f"{counted(depth, 'level')} where its budget allows {budget.depth}"
            raise DrafterError(f"drafter {name!r} proposed {over}")
    return answers


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
