"""The real model: fetched once into the user's own cache, so that the README's two commands share it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import FetchError

ALIAS = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2() -> str:
    from outrider.models.fetch import fetch

    try:
        fetch(ALIAS)
    except FetchError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real model is not here and cannot be fetched: {error}")
    return ALIAS


@pytest.fixture(scope="session")
def open_llm(smollm2: str) -> Iterator[Callable[..., LLM]]:
    """Engines by their settings, each made once for the whole session; the weights of a dtype are read once, and its
    passes are timed once."""
    from outrider.engine import resolve

    made: dict[tuple[tuple[str, Any], ...], LLM] = {}
    load, loaded = resolve.load, {}
    prices_of, priced = resolve.prices_of, {}

    def load_once(model: str, *, dtype: str, **settings: Any) -> Any:
        if dtype not in loaded:
            loaded[dtype] = load(model, dtype=dtype, **settings)
        return loaded[dtype]

    def price_once(target: Any, *given: Any) -> Any:
        if target.dtype not in priced:
            priced[target.dtype] = prices_of(target, *given)
        return copy.deepcopy(priced[target.dtype])  # an engine learns its own from here on

    def get(**settings: Any) -> LLM:
        settings.setdefault("num_slots", 16384)
        settings.setdefault("self_test", False)
        key = tuple(sorted(settings.items()))
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(resolve, "load", load_once)
                patch.setattr(resolve, "prices_of", price_once)
                made[key] = LLM(smollm2, **settings)
        return made[key]

    yield get
    for llm in made.values():
        llm.close()
