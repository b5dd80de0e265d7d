"""What `--drafter all` stands for: every drafter that can guess for a model, with the settings that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.registry import CASCADES, DRAFTERS, NEED_WEIGHTS, READ_BY, reads


def every(model: str, engine: Mapping[str, Any], cascades: Sequence[str] = CASCADES) -> list[str]:
    """All drafters and some cascades, but for those that need weights trained for this model where there are none.

    engine: settings as given; "drafter_model" may name such weights.
    """
    from outrider.models.heads import files

    trained = files.come_with(model)
    if engine.get("drafter_model") is not None:
        trained |= {_kind(engine["drafter_model"])}
    missing = set(NEED_WEIGHTS) - trained
    return [name for name in (*DRAFTERS, *cascades) if missing.isdisjoint(name.split("+"))]


def named(model: str, engine: Mapping[str, Any], cascades: Sequence[str] = CASCADES) -> list[str]:
    """The candidates that `--drafter` names, joined by commas; all that can guess for the model by "all".

    Raises:
        ConfigError: for what is no candidate, and for weights that none of them reads.
    """
    wanted = engine.get("drafter", "all")
    names = every(model, engine, cascades) if wanted == "all" else [name.strip() for name in wanted.split(",")]
    for name in names:
        if name in ("", "none", "auto"):
            raise ConfigError(f"drafter={wanted!r}: {name!r} is no candidate, name drafters joined by commas, or all")
        EngineConfig.of(model=model, drafter=name)
    weights = engine.get("drafter_model")
    if weights is not None and not any("drafter_model" in settings_for(name, engine) for name in names):
        raise ConfigError(f"drafter_model={weights!r} is for {_kind(weights)}: name that drafter too, or give its own")
    return list(dict.fromkeys(names))


def settings_for(drafter: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's settings with this drafter, less those that another drafter alone reads.

    Weights go to the drafter that they were made for.
    """
    kept = {name: value for name, value in engine.items() if reads(name, drafter)}
    named = engine.get("drafter_model")
    if named is not None and drafter != "auto" and _kind(named) not in drafter.split("+"):
        kept.pop("drafter_model", None)
    return {**kept, "drafter": drafter}


def _kind(drafter_model: str) -> str:
    """Which drafter these weights are for; a model of Transformers is for the first that reads the setting."""
    from outrider.models.heads import files

    folder = files.trained(drafter_model)
    return READ_BY["drafter_model"][0] if folder is None else files.kind(folder)
