"""This rank's part of a target: read by Transformers, cut by its plan, and filled into the layers that run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.config import DTYPES
from outrider.errors import ModelError, OutriderError
from outrider.kernels import Kernels, select, settle
from outrider.models import checks
from outrider.models.loader import body_of, float_type, locate, true_vocabulary
from outrider.models.probe import Reference, reference
from outrider.models.ranks.group import Ranks
from outrider.models.ranks.plan import shard
from outrider.models.ranks.read import read_part
from outrider.models.target import Model, Original
from outrider.models.twin import twin_module, widening_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """What rank 0 was asked to load; the fields are those of `EngineConfig`."""

    model: str
    dtype: str
    kernels: str
    threads: int | None
    self_test: bool
    widen: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's layers, and what rank 0 makes a target of.

    Attributes:
        expected: Transformers' own logits, None without a self-test. original: where the model is widened.
    """

    name: str
    body: Model
    kernels: Kernels
    dtype: str
    tokenizer: Any
    config: Any
    generation: Any
    expected: Reference | None
    original: Original | None


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read, before it runs for the first time."""

    name: str
    module: Any
    kernels: Kernels
    dtype: str
    tokenizer: Any
    original: Original | None


def part_of(wanted: Wanted, ranks: Ranks) -> Part | Exception:
    """Load this rank's part, together with all others; where one of them cannot, the error is everybody's."""
    read: _Read | None = None
    error: Exception | None = None
    try:
        read = _read(wanted, ranks)
    except (OutriderError, RuntimeError) as caught:  # the latter is PyTorch's word for too little memory
        error = caught
    error = ranks.agree(error)
    if error is not None:
        return error
    assert read is not None
    part: Part | None = None
    try:
        part = _fill(read, wanted, ranks)
    except OutriderError as caught:  # of what the model is: all ranks find the same
        error = caught
    error = ranks.agree(error)
    if error is not None:
        return error
    assert part is not None
    return part


def _read(wanted: Wanted, ranks: Ranks) -> _Read:
    """The module, cut to this rank's part; where it must be read whole, in the machine's own memory alone."""
    if wanted.dtype not in DTYPES:
        raise ModelError(f"dtype {wanted.dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    if wanted.dtype == "packed":
        raise ModelError("packed weights are not shared among ranks: choose dtype float32 or bfloat16")
    source = locate(wanted.model)
    config, tokenizer = checks.read_config(source), checks.read_tokenizer(source)
    kernels = select(wanted.kernels, ranks.device, wanted.threads)
    if wanted.self_test:
        settle(kernels, ranks.device)
    dtype = float_type(wanted.dtype, source, config, ranks.device)
    held = torch.float32 if dtype == "float32" else torch.bfloat16
    original = None
    module = read_part(source, config, held, ranks) if wanted.widen is None else None
    if module is None:
        module = checks.read_module(source, config, held, torch.device("cpu"))
        if wanted.widen is not None:
            vocabulary = true_vocabulary(config, tokenizer)
            sizes = config.hidden_size, config.num_hidden_layers, vocabulary
            original = Original(source.name, wanted.widen, config, *sizes, tokenizer)
            module = twin_module(module, widening_of(module, wanted.widen))
        shard(module, ranks)
    return _Read(source.name, module.to(ranks.device), kernels, dtype, tokenizer, original)


def _fill(read: _Read, wanted: Wanted, ranks: Ranks) -> Part:
    """The layers that run, and what Transformers' own arithmetic says of the same parts."""
    module, config, expected = read.module, read.module.config, None
    if wanted.self_test and read.dtype != "int8":
        expected = reference(module, true_vocabulary(config, read.tokenizer))
    body, generation = body_of(module, read.kernels, read.dtype, ranks), module.generation_config
    del module
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return Part(
        name=read.name,
        body=body,
        kernels=read.kernels,
        dtype=read.dtype,
        tokenizer=read.tokenizer,
        config=config,
        generation=generation,
        expected=expected,
        original=read.original,
    )
