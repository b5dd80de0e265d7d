"""What `EngineConfig` and `SamplingParams` refuse: wrong kinds and values, each by the field's name."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from outrider.config import EngineConfig
from outrider.errors import ConfigError, RequestError
from outrider.request import LogprobsMode, SamplingParams


@pytest.mark.parametrize(
    "settings",
    [
        {"model": None},
        {"model": 5},
        {"drafter": None},
        {"drafter_model": 5},
        {"device": None},
        {"width": "2"},
        {"max_rows": None},
        {"max_rows": 1.5},
        {"block_size": True},
        {"adaptive": "no"},
        {"prefix_cache": None},
        {"threads": 10**6},
    ],
)
def test_engine_settings_of_a_wrong_kind_are_refused_by_name(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^{name}="):
        EngineConfig(**{"model": "m", **settings})


def test_a_path_is_a_model():
    assert EngineConfig(model=Path("folder")).model == "folder"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [None, "1", True, 10**400, 1e300, math.nan]),
        ("frequency_penalty", [1e300, -1e300]),
        ("repetition_penalty", [1e300]),
        ("top_k", [1.5, np.ones(2)]),
        ("n", [0, None]),
        ("stop", [None, 5, "text", ("",), ("a", 1), (text for text in ["a"])]),
        ("stop_token_ids", [None, 5, ("a",), (True,), (-1,), (token for token in [1]), np.array([1])]),
        ("bad_words", [None, 5, "text", (5,), ((),), ([5, "a"],), (word for word in ["a"])]),
        ("logit_bias", [None, [1], {"a": 1}, {True: 1}, {1: "x"}, {1: None}, {1: 10**400}, {1: math.inf}, {-1: 0.0}]),
        ("logprobs_mode", ["cooked", None, 5]),
        ("ignore_eos", ["no", None]),
        ("speculation", [0]),
        ("width", [0, 1.5]),
        ("trace", [1, None]),
        ("automaton", ["a*b"]),
    ],
)
def test_sampling_fields_of_a_wrong_kind_are_refused_by_name(name, values):
    """A generator, too: it could be read only once, by the check itself."""
    for value in values:
        with pytest.raises(RequestError, match=f"^{name}="):
            SamplingParams(**{name: value})


def test_a_mode_may_be_given_by_its_name_and_a_bias_may_forbid():
    assert SamplingParams(logprobs_mode="warped").logprobs_mode is LogprobsMode.WARPED  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={1: -math.inf}).logit_bias == {1: -math.inf}


def test_a_share_of_memory_is_a_share():
    assert EngineConfig(model="m", memory_share=1).memory_share == 1.0
    for share in (0.0, -0.5, 1.5, math.nan):
        with pytest.raises(ConfigError, match=r"^memory_share="):
            EngineConfig(model="m", memory_share=share)
