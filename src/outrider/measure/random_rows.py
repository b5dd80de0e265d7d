"""Kinds of models whose weights are seldom at hand, with random ones: their speed is true, what they say means nothing.

No guess is accepted under random weights, so only plain decoding and passes are measured: a wide pass over a narrow one
is the price of guessing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.config import EngineConfig
from outrider.engine.resolve import equip
from outrider.errors import ConfigError, OutriderError
from outrider.kernels import select, settle
from outrider.measure.child import first_line
from outrider.measure.cycle import Decoding, TimedEngine, answer
from outrider.measure.passes import key_bytes, measure_passes, streamed_bytes
from outrider.models.loader import assemble, body_of
from outrider.models.target import Target
from outrider.record import Laps
from outrider.request import SamplingParams

NO_MEANING = "random weights: true in speed alone"
"""Stands above the figures."""
WIDE = 16
"""Rows of the wide pass."""
BLOCK = 16


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A shape, and where it is measured.

    Attributes:
        what: for people. model_type, sizes: of Transformers' config. context: known tokens behind which it decodes.
    """

    what: str
    model_type: str
    sizes: Mapping[str, Any]
    context: int


MODELS: Mapping[str, RandomModel] = MappingProxyType(
    {
        "window": RandomModel(
            "sliding window of 4,096: the shape of Mistral 7B",
            "mistral",
            {"sliding_window": 4096, "max_position_embeddings": 32768},
            8192,
        ),
        "long": RandomModel(
            "context of 32k: the shape of Llama 3.1 8B",
            "llama",
            {
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128_256,
                "max_position_embeddings": 65536,
            },
            32768,
        ),
        "experts": RandomModel(
            "mixture of experts, 8 of 128: the shape of Qwen3 30B-A3B, half of its layers",
            "qwen3_moe",
            {"num_hidden_layers": 24, "head_dim": 128, "max_position_embeddings": 32768},
            1024,
        ),
    }
)


def measure_random(
    models: Mapping[str, RandomModel],
    device: torch.device,
    bytes_per_second: float,
    max_tokens: int = 64,
    repeats: int = 10,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """One row a model, as plain data; one that says why where it cannot be measured here.

    Args:
        bytes_per_second: the read limit of the device.
    """
    rows = []
    for name, model in models.items():
        progress(f"{name}: {NO_MEANING}")
        try:
            rows.append(
                {"name": name, "what": model.what, **_row(model, device, bytes_per_second, max_tokens, repeats)}
            )
        except (OutriderError, torch.OutOfMemoryError) as error:
            rows.append({"name": name, "what": model.what, "error": first_line(error)})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def random_target(model: RandomModel, device: torch.device) -> Target:
    """The shape with fresh weights, bfloat16 on a GPU and float32 on a CPU, served as a loaded model is."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = AutoConfig.for_model(model.model_type, **model.sizes)
    kernels = select("auto", device)
    settle(kernels, device)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    body = body_of(module, kernels)
    tokenizer = Words(config.vocab_size)
    name = str(dtype).removeprefix("torch.")
    return assemble(model.what, body, name, device, kernels, tokenizer, config, module.generation_config)


def _row(
    model: RandomModel, device: torch.device, bytes_per_second: float, max_tokens: int, repeats: int
) -> dict[str, Any]:
    target = random_target(model, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the lean layers fused
    longest = model.context + max(max_tokens, WIDE)
    if longest > target.max_positions:
        raise ConfigError(f"{longest} positions exceed the model's {target.max_positions}: lower the context")
    slots = (-(-longest // BLOCK) + 3) * BLOCK  # one block belongs to nobody, one is for guesses
    config = EngineConfig(
        model=model.what, drafter="none", max_context=longest, max_requests=1, num_slots=slots, prefix_cache=False
    )
    engine, resolved = equip(config, target, Laps())
    shapes = ((1, 1), (1, WIDE))
    passes, notes = measure_passes(target, shapes, model.context, repeats, engine.pages)
    generator = torch.Generator().manual_seed(0)
    prompt = tuple(torch.randint(target.vocab_size, (model.context,), generator=generator).tolist())
    timed = TimedEngine(engine)
    answer(timed, [prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    plain = Decoding.of(timed.cycles())
    nbytes = streamed_bytes(target, 1) + key_bytes(target, model.context + max_tokens // 2)
    return {
        "way": target.way,
        "fixed_width": target.fixed_width,
        "nbytes": target.nbytes,
        "context": model.context,
        "passes": [{**asdict(p), "share_of_limit": p.share(bytes_per_second)} for p in passes],
        "plain": asdict(plain),
        "share_of_limit": nbytes / bytes_per_second / plain.cycle,
        "notes": [*resolved.notes, *notes],
    }


class Words:
    """What a target asks of a tokenizer, for a model that nobody talks to."""

    eos_token_id = None

    def __init__(self, size: int) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self._size)}


def chosen(names: Sequence[str]) -> dict[str, RandomModel]:
    """The models of these names; "all" are all of them."""
    wanted = list(MODELS) if "all" in names else list(dict.fromkeys(names))
    return {name: MODELS[name] for name in wanted}
