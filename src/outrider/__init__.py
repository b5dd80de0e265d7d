"""Outrider: exact speculative decoding for Transformers models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.config import EngineConfig
from outrider.errors import OutriderError
from outrider.request import SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "OutriderError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM brings PyTorch, which takes seconds to import; `outrider --help` must not wait for it.
    if name == "LLM":
        from outrider.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
