"""A GGUF file as a folder in Transformers' layout: exactly dequantised weights, and a tokenizer that splits as it."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from outrider.errors import ModelError
from outrider.models.gguf import read_header


def convert(packed: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write config, tokenizer, generation config and `model.safetensors` (float32) of a GGUF file into `folder`.

    Raises:
        ModelError: if the file is damaged, or Transformers does not know its architecture. OSError: a full disk.
    """
    read_header(packed)
    try:
        with quiet(speaks=True):
            tokenizer = gguf_tokenizer(packed)
            progress(1, 3)
            config = AutoConfig.from_pretrained(packed.parent, gguf_file=packed.name)
            module = AutoModelForCausalLM.from_pretrained(
                packed.parent, gguf_file=packed.name, config=config, dtype=torch.float32
            )
            progress(2, 3)
            tokenizer.model_max_length = config.max_position_embeddings
            tokenizer.save_pretrained(folder)
            module.generation_config.save_pretrained(folder)
            _save(module, folder)
    except (ValueError, KeyError, ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Transformers raises some without a number
            raise
        raise ModelError(f"{packed.name}: Transformers cannot read this GGUF file ({error})") from error
    progress(3, 3)


def _save(module: Any, folder: Path) -> None:
    """`save_pretrained` by hand: Transformers refuses it for weights that came from a GGUF, even dequantised ones."""
    weights, seen = {}, set()
    for name, weight in module.state_dict().items():
        if weight.data_ptr() not in seen:  # a tied head is written once, under its first name
            seen.add(weight.data_ptr())
            weights[name] = weight.float().contiguous()
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # it speaks of a full disk in words only
        raise OSError(errno.ENOSPC if "No space left" in str(error) else errno.EIO, str(error)) from error
    config = {
        k: v for k, v in module.config.to_diff_dict().items() if k not in ("quantization_config", "_name_or_path")
    }
    config |= {"architectures": [type(module).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def gguf_tokenizer(packed: Path) -> Any:
    """The tokenizer inside a GGUF file, with two faults of Transformers' conversion mended.

    Versions before 5.24 mix up the special tokens, so these are taken from the file by their ids. And the split of
    digits that the pre-tokenizer named "smollm" makes before byte-level pairs are merged is left out, so runs of
    blanks before a number would come out otherwise than the model was trained on.
    """
    tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    metadata = read_header(packed).metadata
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token))
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer


@contextmanager
def quiet(progress: Callable[[int, int], None] | None = None, speaks: bool = False) -> Iterator[None]:
    """Keep Transformers' own progress bars and warnings off a person's terminal while the block runs.

    progress: told of what its bars would have shown, such as the weights that are read. speaks: what runs has bars that
        no switch turns off (GGUF files, compressed-tensors), so that it has no standard error.
    """
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def watched(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watches = progress is not None and len(args) == 1 and hasattr(args[0], "__len__")
        return _Watched(args[0], progress) if watches and progress else factory(*args, **kwargs)

    silence = redirect_stderr(io.StringIO()) if speaks else nullcontext()
    swap = getattr(logging, "set_tqdm_hook", lambda hook: None)  # versions without it show no progress
    hook = swap(watched)
    try:
        with silence:
            yield
    finally:
        swap(hook)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


class _Watched:
    """What stands in for a bar of Transformers' over something with a length."""

    def __init__(self, items: Any, progress: Callable[[int, int], None]) -> None:
        self._items, self._progress = items, progress

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self._items, start=1):
            yield item
            self._progress(done, len(self._items))
