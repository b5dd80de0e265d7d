"""What every trained drafter is: a module with the tensors of its artefact, a loss, and counts of what it would hit."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError, TrainingError
from outrider.models.checks import first_line
from outrider.registry import unknown
from outrider.training.corpus import Batch
from outrider.training.harvest import Features
from outrider.training.layers import Shape
from outrider.training.losses import Scores


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over the rows of one batch or more, by guessed level k = 0 .. K - 1; every field (K,) float64 on the device.

    Attributes:
        rows: rows scored. hits: those whose likeliest draft token is the target's likeliest. alpha: sum of their
            acceptance 1 - TV. starts: rows that a chain of levels 0 .. k leads to. chains: those of them where every
            level of the chain hit.
    """

    rows: Tensor
    hits: Tensor
    alpha: Tensor
    starts: Tensor
    chains: Tensor

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self._fields(), other._fields(), strict=True)))

    def gathered(self, gather: Any) -> Counts:
        """Summed over all processes by `gather(tensor, "sum")`."""
        return Counts(*(gather(values, "sum") for values in self._fields()))

    def _fields(self) -> tuple[Tensor, ...]:
        return (self.rows, self.hits, self.alpha, self.starts, self.chains)

    def figures(self) -> dict[str, list[float] | float]:
        """Rates for people: `hit` and `alpha` by level, and `tau`, the mean accepted length of a greedy chain of K
        levels on the target's own text, bonus included. Reads the device.
        """
        rows, hits, alpha, starts, chains = (values.clamp_min(0).tolist() for values in self._fields())
        return {
            "hit": [h / max(n, 1.0) for h, n in zip(hits, rows, strict=True)],
            "alpha": [a / max(n, 1.0) for a, n in zip(alpha, rows, strict=True)],
            "tau": 1 + sum(c / max(n, 1.0) for c, n in zip(chains, starts, strict=True)),
        }


class DraftModule(nn.Module, ABC):
    """A drafter while it is trained. Its parameters and persistent buffers are the tensors of its artefact.

    Attributes:
        learning_rate: peak that suits this kind. num_levels: K. taps: target layers it reads.
    """

    learning_rate: ClassVar[float] = 1e-3
    full_vocabulary: ClassVar[bool] = False
    """It speaks with the target's whole head: there are no kept ids to choose."""
    num_levels: int
    taps: tuple[int, ...] = ()
    kept_ids: Tensor

    def __init__(self, shape: Shape, kept_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("kept_ids", kept_ids.to(torch.int32))

    @classmethod
    @abstractmethod
    def initialise(cls, module: Any, kept_ids: Tensor, **settings: Any) -> Self:
        """A fresh drafter for a target (a Transformers causal language model), on the target's device, in float32.

        Args:
            kept_ids: (V_d,) target ids that it will know, ascending. settings: the kind's own sizes.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Sizes that its artefact's `config.json` states."""

    @abstractmethod
    def loss(self, batch: Batch, features: Features) -> tuple[Tensor, Counts]:
        """The loss to minimise (a scalar) and what the batch shows. Nothing waits for the device."""

    def forward(self, batch: Batch, features: Features) -> tuple[Tensor, Counts]:
        return self.loss(batch, features)

    def fusible(self) -> list[tuple[nn.Module, str]]:
        """Methods of many small operations, by the module that has them and their name."""
        return []

    def fuse(self) -> None:
        """Run them through `torch.compile`; modules that are alike share one compilation."""
        for owner, part in self.fusible():
            setattr(owner, part, torch.compile(getattr(owner, part), dynamic=True))

    def unfuse(self) -> None:
        """Run everything as it is written again."""
        for owner, part in self.fusible():
            vars(owner).pop(part, None)

    def settle(self, held_out: Iterable[tuple[Batch, Features]]) -> None:
        """Measure, after training, what the artefact states of itself on held-out text."""

    def tensors(self) -> dict[str, Tensor]:
        """The artefact: weights as bfloat16, ids and measured rates as they are; on the CPU, sharing nothing."""
        learned = {name for name, _ in self.named_parameters()}
        return {
            name: value.detach().to("cpu", torch.bfloat16 if name in learned else value.dtype, copy=True)
            for name, value in self.state_dict().items()
        }


def refuse_unknown(kind: type[DraftModule], settings: Mapping[str, Any]) -> None:
    """Hold the sizes that were given against those that a kind has.

    Raises:
        ConfigError: for one that it has not.
    """
    known = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "shape", "kept_ids")]
    problem = unknown("setting", settings, known)
    if problem:
        raise ConfigError(problem)


def build(
    kind: type[DraftModule],
    module: Any,
    kept_ids: Tensor,
    settings: dict[str, Any],
    initial: Mapping[str, Tensor] | None,
) -> DraftModule:
    """A fresh draft module, or one that begins with the tensors of another.

    Raises:
        ConfigError: for a setting that this kind does not have. TrainingError: for tensors of other sizes.
    """
    refuse_unknown(kind, settings)
    made = kind.initialise(module, kept_ids, **settings)
    if initial is not None:
        try:
            made.load_state_dict({"kept_ids": made.kept_ids, **initial})
        except RuntimeError as error:
            raise TrainingError(
                f"the drafter to begin with has other sizes ({first_line(error)}): give the same --shape"
            ) from error
    return made


def before(states: Tensor, rows: Tensor, level: int) -> Tensor:
    """The state that predicts at `level` what each of N rows predicts: (B, S, H), (N,) -> (N, H).

    The drafter that stands at position j guesses x_{j+1+level}, whose law is found at row j + level.
    """
    return states.flatten(0, 1).index_select(0, (rows - level).clamp_min(0))


def combine(scores: Sequence[Scores], offsets: Tensor, weights: Sequence[float]) -> tuple[Tensor, Counts]:
    """Loss and counts of K levels scored over the same N entries; level k counts where its start lies in the reply.

    Args:
        scores: of each level, aligned by predicted token. offsets: (N,), `Batch.offsets`. weights: of each level.
    """
    inside = [offsets >= level for level in range(len(scores))]
    losses = [
        weight * (score.loss * mask).sum() / mask.sum().clamp_min(1)
        for weight, score, mask in zip(weights, scores, inside, strict=True)
    ]
    chains: list[Tensor] = []
    reached = torch.ones_like(offsets, dtype=torch.bool)
    for score, mask in zip(scores, inside, strict=True):
        # What stands one entry back is the same chain one level up.
        reached = (reached if not chains else reached.roll(1)) & score.hit & mask
        chains.append(reached)
    rows = torch.stack(inside).sum(dim=1).double()
    counts = Counts(
        rows=rows,
        hits=_sums([score.hit & mask for score, mask in zip(scores, inside, strict=True)]),
        alpha=_sums([score.alpha * mask for score, mask in zip(scores, inside, strict=True)]),
        starts=rows,
        chains=_sums(chains),
    )
    return torch.stack(losses).sum() / sum(weights), counts


def _sums(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack([values.sum(dtype=torch.float64) for values in rows])
