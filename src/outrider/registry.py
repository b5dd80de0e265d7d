"""A named table of lazy imports: the only place where a drafter's name is written."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from outrider.errors import ConfigError


class Registry(Mapping[str, Any]):
    """Names to objects, imported when first asked for.

    Raises:
        ConfigError: for an unknown name, naming the nearest known one.
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = entries

    def __getitem__(self, name: str) -> Any:
        path = self._entries.get(name)
        if path is None:
            raise ConfigError(f"unknown {self.kind} {name!r}: {nearest(name, self._entries)}")
        module, _, attribute = path.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def unknown(kind: str, names: Iterable[str], known: list[str]) -> str | None:
    """The sentence on the first name that is not known; None where all are."""
    return next((f"unknown {kind} {name!r}: {nearest(name, known)}" for name in names if name not in known), None)


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """`did you mean 'x'?` where something is close, else the list of all known names."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(sorted(known))}"


DRAFTERS = Registry(
    "drafter",
    {
        "ngram": "outrider.drafters.ngram:Ngram",
        "suffix": "outrider.drafters.suffix:Suffix",
        "lookahead": "outrider.drafters.lookahead:Lookahead",
        "small_model": "outrider.drafters.small_model:small_model",
        "early_exit": "outrider.drafters.early_exit:EarlyExit",
        "medusa": "outrider.drafters.medusa:Medusa",
        "eagle3": "outrider.drafters.eagle3:Eagle3",
        "block": "outrider.drafters.block:Block",
    },
)

CASCADES = ("ngram+small_model",)
"""Any two drafters joined by "+" are a drafter; these pairs stand for all where every drafter is run."""

NEED_WEIGHTS = ("medusa", "eagle3", "block")
"""Drafters that cannot be built without weights trained for their target."""

TRAINED = Registry(
    "trained drafter",
    {
        "small_model": "outrider.training.small_model:SmallModel",
        "medusa": "outrider.training.medusa:Medusa",
        "eagle3": "outrider.training.eagle3:Eagle3",
        "block": "outrider.training.block:Block",
        "early_exit": "outrider.training.early_exit:EarlyExit",
    },
)
"""The module that is trained for each drafter that learns from a target."""

EXPORTED = Registry(
    "drafter that is exported",
    {
        "small_model": "outrider.export.small_model:SmallModel",
        "medusa": "outrider.export.medusa:Medusa",
        "eagle3": "outrider.export.eagle3:Eagle3",
        "block": "outrider.export.block:Block",
    },
)
"""What writes a trained drafter as other engines read it."""

FOREIGN = Registry(
    "head of others",
    {
        "medusa": "outrider.models.heads.foreign_medusa:read",
        "eagle3": "outrider.models.heads.foreign_eagle3:read",
        "block": "outrider.models.heads.foreign_block:read",
    },
)
"""What reads the heads of others as a drafter of ours."""

THERE: Mapping[str, tuple[str, str | None, str | None]] = MappingProxyType(
    {
        "small_model": ("draft_model", "STANDALONE", "DraftTarget"),
        "medusa": ("medusa", None, None),
        "eagle3": ("eagle3", "EAGLE3", "Eagle3"),
        "block": ("dflash", "DFLASH", "DFlash"),
    }
)
"""A drafter's kind as vLLM's `method` and the `speculators` layout, SGLang's `--speculative-algorithm` and
TensorRT-LLM's `decoding_type` call it; None where there is none."""

AUTHORS: Mapping[str, str] = MappingProxyType(
    {"block": "dflash_config", "medusa": "medusa_num_heads", "eagle3": "draft_vocab_size"}
)
"""The field by which a head's config.json is known that is written as its authors write it, in this order."""

READ_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "drafter_model": ("small_model", "early_exit", "medusa", "eagle3", "block"),
        "exit_layers": ("early_exit",),
        "share_history": ("suffix",),
    }
)
"""Settings that only some drafters read."""

ELSEWHERE: Mapping[str, tuple[Mapping[str, Any], str | None]] = MappingProxyType(
    {
        "ngram": (MappingProxyType({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}), "NGRAM"),
        "suffix": (MappingProxyType({"method": "suffix"}), None),
        "small_model": (MappingProxyType({"method": "draft_model"}), "STANDALONE"),
    }
)
"""The nearest equal of a drafter in vLLM's `--speculative-config` and SGLang's `--speculative-algorithm`; what is
trained here is taken there by `outrider export`, as far as their layouts can say it."""


def reads(setting: str, drafter: str) -> bool:
    """Whether a drafter, or one of the two that a cascade joins, reads a setting; most are read by all."""
    readers = READ_BY.get(setting)
    return readers is None or drafter == "auto" or not set(readers).isdisjoint(drafter.split("+"))
