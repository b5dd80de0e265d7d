"""Reads a model's parts through Transformers and refuses, in one sentence, what cannot be served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.errors import ModelError
from outrider.models import quantised
from outrider.models.convert import gguf_tokenizer, quiet

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files lie: a folder in Transformers' layout, a GGUF file, or both."""

    name: str
    folder: Path | None
    gguf: Path | None

    def reference(self) -> tuple[Path, dict[str, str]]:
        """What Transformers' `from_pretrained` takes: a folder, and the file's name in it where it is a GGUF."""
        if self.folder is not None:
            return self.folder, {}
        assert self.gguf is not None
        return self.gguf.parent, {"gguf_file": self.gguf.name}


def read_config(source: Source) -> Any:
    """The model's config.

    Raises:
        ModelError: if it is missing or broken, or describes no decoder-only language model.
    """
    reference, extra = source.reference()
    if source.folder is not None and not (source.folder / "config.json").is_file():
        raise ModelError(f"{source.name} has no config.json: give a model folder in the Transformers layout")
    try:
        config = AutoConfig.from_pretrained(reference, trust_remote_code=False, **extra)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise ModelError(f"{source.name} has a config that Transformers cannot read ({first_line(error)})") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{source.name} ({config.model_type}) is an encoder-decoder: give a decoder-only model")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if known is None:
        raise ModelError(f"{source.name} ({config.model_type}) is no causal language model of Transformers")
    known_names = (known,) if isinstance(known, str) else tuple(known)
    stated = (getattr(config, "architectures", None) or known_names)[0]
    if stated not in known_names:
        raise ModelError(f"{source.name} holds a {stated}, not a causal language model ({known_names[0]})")
    return config


def read_tokenizer(source: Source) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: if there is none, or Transformers cannot read it.
    """
    reference, extra = source.reference()
    if source.folder is not None and not any((source.folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"{source.name} has no tokenizer: put its tokenizer.json beside config.json")
    try:
        with quiet():
            if extra:
                return gguf_tokenizer(reference / extra["gguf_file"])
            return AutoTokenizer.from_pretrained(reference, trust_remote_code=False)
    except Exception as error:  # tokenizer backends raise bare Exceptions
        raise ModelError(
            f"{source.name} has a tokenizer that Transformers cannot read ({first_line(error)})"
        ) from error


def read_generation_config(source: Source) -> GenerationConfig | None:
    """What the folder says of ends; None where it says nothing.

    Raises:
        ModelError: if the file is broken.
    """
    if source.folder is None or not (source.folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(source.folder)
    except (ValueError, OSError, TypeError) as error:
        raise ModelError(f"{source.name} has a broken generation_config.json ({first_line(error)})") from error


def read_module(
    source: Source,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The module with all of its weights. progress: told of how many of them were read.

    Raises:
        ModelError: if a weight is missing, of another shape, or left over, or its quantisation's library is not here.
    """
    reference, extra = source.reference()
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained  # its type does not know of the loading info
    if source.folder is not None:
        check_weight_files(source.name, source.folder)
    quantised.prepare(source.name, config)
    try:
        with quiet(progress, speaks=bool(extra) or quantised.speaks(config)):
            module, info = from_pretrained(
                reference,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
                trust_remote_code=False,
                **extra,
            )
            quantised.settle(module)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        raise ModelError(f"{source.name} has weights that Transformers cannot load ({first_line(error)})") from error
    missing, wrong = sorted(info["missing_keys"]), sorted(str(key) for key in info["mismatched_keys"])
    if missing or wrong:
        raise ModelError(
            f"{source.name} lacks weights that its config asks for ({(missing + wrong)[0]}): fetch it again"
        )
    surplus = sorted(key for key in info["unexpected_keys"] if re.search(r"\.\d+\..*weight$", key))
    if surplus:
        raise ModelError(
            f"{source.name} holds layers that its config does not know ({surplus[0]}): the two do not match"
        )
    return module.to(device).eval()


def check_weight_files(name: str, folder: Path) -> None:
    """Refuse safetensors that are cut short or missing from their index, before anything is loaded.

    Raises:
        ModelError: naming the file.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted({folder / shard for shard in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is no index of weights: download it again") from error
    if not files and not any(folder.glob("*.bin")):
        raise ModelError(f"{name} has no weights: expected model.safetensors beside config.json")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing: download the model again")
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length)) if length < size else {}
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        ends = []
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}): check its permissions") from error
    if not ends:
        raise ModelError(f"{file} is no safetensors file, or cut short in its header: download it again")
    needed = 8 + length + max(ends)
    if size < needed:
        raise ModelError(f"{file} is cut short ({size:,} of {needed:,} bytes): download it again")


def longest_context(config: Any) -> tuple[int, list[str]]:
    """Most positions of one request, and a note where a rotary variant makes it shorter than the config says.

    Long-context variants that look at the longest position of the whole pass would change a request by its
    neighbours; up to their original length they never switch, so the context ends there.

    Raises:
        ModelError: if the config names no longest context.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int):
        raise ModelError(f"{config.model_type} names no longest context (max_position_embeddings)")
    parameters = getattr(config, "rope_parameters", None) or {}
    variants = [v for v in (parameters, *parameters.values()) if isinstance(v, dict) and "rope_type" in v]
    limit = stated
    for variant in variants:
        if variant["rope_type"] in ("longrope", "dynamic"):
            original = variant.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, original or stated)
    if limit == stated:
        return stated, []
    return limit, [
        f"context of {limit:,} positions instead of {stated:,}: beyond it the rotary scaling looks at neighbours"
    ]


def end_ids(generation: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: the generation config's and the tokenizer's own."""
    stated = getattr(generation, "eos_token_id", None)
    ids = set(stated) if isinstance(stated, (list, tuple)) else {stated}
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, short enough for one sentence."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".:")
