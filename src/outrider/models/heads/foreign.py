"""Heads of others as drafters of ours: read in their layout, held against the target, said in our names.

Sources: the layouts are those of SafeAILab/EAGLE, FasterDecoding/Medusa, z-lab/dflash and vllm-project/speculators,
and of the readers of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from outrider.errors import ModelError
from outrider.models.heads import layouts
from outrider.models.heads.files import FORMAT, Artefact, describe_target
from outrider.models.target import Target
from outrider.registry import FOREIGN

ALIKE = 0.9
"""Least mean cosine between input rows that are the target's own: its weights may be in few bits, or tuned a little."""
_ROWS = 256
"""Input rows that are compared."""


def is_foreign(folder: Path) -> bool:
    """Whether a folder holds a head of others.

    Raises:
        ModelError: for a head of a kind that no drafter here reads.
    """
    config = layouts.config_of(folder)
    return "drafter" not in config and layouts.recognised(config) is not None


def load(folder: Path, drafter: str, target: Target) -> Artefact:
    """A head of others for this target, in memory.

    Raises:
        ModelError: if it is damaged, of another kind, was trained for another target, or cannot be served here.
    """
    config = layouts.config_of(folder)
    kind = layouts.recognised(config)
    if kind != drafter:
        raise ModelError(f"{folder} holds a drafter of the kind {kind!r}: choose it, or another folder")
    if target.original is not None:
        raise ModelError(f"{folder} holds a head of others, which is not widened: leave widen out, or train a drafter")
    head = Head(folder.name, drafter, config, layouts.weights_of(folder), target)
    try:
        fields, tensors = FOREIGN[drafter](head)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(
            f"{folder} has not the config or the tensors of its layout ({error}): fetch it again"
        ) from error
    described = {"format": FORMAT, "drafter": drafter, "target": describe_target(target)}
    return Artefact({**described, **fields}, tensors)


class Head:
    """A head as it lies in its folder, beside the target that it shall guess for.

    Args:
        name: of the folder. weights: by their names there.
    """

    def __init__(
        self, name: str, drafter: str, config: Mapping[str, Any], weights: Mapping[str, Tensor], target: Target
    ) -> None:
        self.name = name
        self.drafter = drafter
        self.config = config
        self.weights = weights
        self.target = target
        self.layer: Mapping[str, Any] = config.get("transformer_layer_config", config)
        """What says the sizes of its layers."""

    def differ(self, what: str) -> ModelError:
        return ModelError(
            f"the {self.drafter} head in {self.name} was trained for another target than {self.target.name} ({what}): "
            f"choose one of this target, or train one with `outrider train {self.drafter} --target {self.target.name}`"
        )

    def refuse(self, what: str, remedy: str) -> ModelError:
        return ModelError(f"the {self.drafter} head in {self.name} {what}: {remedy}")

    def check_sizes(self) -> None:
        """Refuse a head of other sizes or of another architecture's target.

        Raises:
            ModelError: naming what differs.
        """
        text = self.target.config.get_text_config(decoder=True)
        hidden = self.config.get("target_hidden_size") or self.layer.get("hidden_size", self.target.hidden_size)
        if hidden != self.target.hidden_size:
            raise self.differ(f"hidden_size is {hidden} there and {self.target.hidden_size} here")
        if self.layer.get("hidden_size", hidden) != hidden:
            raise self.refuse("is of another width than its target", "choose one of the target's own hidden size")
        words = self.weights["t2d"].shape[0] if "t2d" in self.weights else self.layer.get("vocab_size")
        if words not in (None, text.vocab_size, self.target.vocab_size):
            raise self.differ(f"vocab_size is {words} there and {text.vocab_size} here")
        told = (self.config.get("speculators_config") or {}).get("verifier", {}).get("architectures") or []
        own = self.target.config.architectures or []
        if told and own and set(told).isdisjoint(own):
            raise self.differ(f"it is a head for {told[0]}, this is {own[0]}")

    def taps(self, inputs: list[int]) -> list[int]:
        """Layers whose outputs are read, told by the layers whose inputs they are.

        Raises:
            ModelError: if the target has not all of them.
        """
        layers = [layer - 1 for layer in inputs]
        if any(layer not in range(self.target.num_layers) for layer in layers):
            raise self.differ(f"it reads before layer {max(inputs)}, and there are {self.target.num_layers}")
        return layers

    def embedding(self, trained: bool) -> dict[str, Tensor]:
        """`embed.weight`, where the head brings rows that are not the target's.

        trained: whether they may be other rows; else they are a copy of the target's.

        Raises:
            ModelError: for a copy of another target's.
        """
        rows = self.weights.get("embed_tokens.weight")
        if rows is None:
            return {}
        rows = rows[: self.target.vocab_size]
        if rows.shape != (self.target.vocab_size, self.target.hidden_size):
            raise self.differ(f"its input rows are {tuple(rows.shape)}")
        some = torch.linspace(0, len(rows) - 1, min(len(rows), _ROWS)).long()
        theirs = self.target.model.embed(some.to(self.target.device)).float().cpu()
        alike = float(cosine_similarity(rows[some].float(), theirs).mean())
        if alike >= ALIKE:
            return {}
        if not trained:
            raise self.differ(f"the input rows that it brings are not this target's, their mean cosine is {alike:.2f}")
        return {"embed.weight": rows}

    def vocabulary(self, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Target ids that its output rows (V_d, H) stand for, ascending (V_d,) int32, and the rows in that order.

        `d2t` tells how far a row's id is from its number; without it every id has a row.
        """
        told, limit = self.weights.get("d2t"), self.target.vocab_size
        if told is None:
            count = limit if rows is None else min(limit, rows.shape[0])
            return torch.arange(count, dtype=torch.int32), None if rows is None else rows[:count]
        ids = told.to(torch.int64) + torch.arange(told.shape[0])
        order = ids.argsort()
        order = order[ids[order] < limit]
        ids = ids[order]
        if not len(ids) or ids[0] < 0 or bool((ids.diff() < 1).any()):
            raise self.refuse("has a d2t that names an id twice or none", "fetch it again")
        return ids.to(torch.int32), None if rows is None else rows[order]
