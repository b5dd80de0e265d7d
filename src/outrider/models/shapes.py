"""The shapes that models and drafters are widened to, by the name of a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from outrider.models.lean_spec import LeanSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-like model."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int

    @staticmethod
    def of(spec: LeanSpec) -> Shape:
        return Shape(**{entry.name: getattr(spec, entry.name) for entry in fields(Shape)})


LLAMA_8B = Shape(4096, 32, 32, 8, 128, 14336, 128_256)
"""Llama 3.1 8B."""
LLAMA_70B = Shape(8192, 80, 64, 8, 128, 28672, 128_256)
"""Llama 3.1 70B."""
LLAMA_1B = Shape(2048, 16, 32, 8, 64, 8192, 128_256)
"""Llama 3.2 1B, the natural small drafter of the 8B."""
DRAFT_VOCABULARY = 32_000
"""Words of the published EAGLE-3 heads of that 8B."""


def target_shape(name: str, small: Shape) -> Shape:
    """What the plan of that name (`config.WIDENINGS`) makes of a target of these sizes."""
    return LLAMA_8B if name == "8b" else doubled(small)


def draft_shape(name: str, small: Shape) -> Shape:
    """The natural stand-alone drafter beside it; its heads keep their size."""
    return LLAMA_1B if name == "8b" else replace(doubled(small), head_dim=small.head_dim)


def draft_words(name: str, count: int) -> int:
    """Words of a draft head with output rows of its own, where the original's has `count`."""
    return max(count, DRAFT_VOCABULARY) if name == "8b" else 2 * count


def doubled(small: Shape) -> Shape:
    """Twice of everything, four times the queries, two layers more: a twin for tests."""
    return Shape(
        hidden=2 * small.hidden,
        num_layers=small.num_layers + 2,
        num_heads=4 * small.num_heads,
        num_kv_heads=2 * small.num_kv_heads,
        head_dim=2 * small.head_dim,
        intermediate=2 * small.intermediate,
        vocab_size=2 * small.vocab_size,
    )
