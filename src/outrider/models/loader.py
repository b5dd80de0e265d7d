"""From a name to a target: finds the files, refuses what cannot be served, and chooses the way through a pass."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoModelForCausalLM

from outrider.config import DTYPES, cache_folder
from outrider.errors import ModelError
from outrider.kernels import Kernels, select, settle
from outrider.models import checks, quantised
from outrider.models.checks import Source
from outrider.models.fetch import ALIASES, PACKED_FILE, Progress, is_whole, silent
from outrider.models.fetch import fetch as bring
from outrider.models.gguf import read_header
from outrider.models.lean import LeanModel
from outrider.models.lean_weights import KEEP, Filling
from outrider.models.module import ModuleModel
from outrider.models.probe import probe, reference
from outrider.models.ranks.group import Ranks
from outrider.models.target import FIXED_WIDTH, Model, Original, Target
from outrider.models.twin import as_twin, twin_model, widening_of
from outrider.record import Laps

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


def load(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    kernels: str | Kernels = "auto",
    threads: int | None = None,
    pass_width: int | None = None,
    fetch: bool = False,
    progress: Progress | None = None,
    self_test: bool = True,
    widen: str | None = None,
    laps: Laps | None = None,
) -> Target:
    """Load a target (or a small drafter model): an alias, a folder, a `.gguf` file or a hub id.

    Args:
        dtype: "packed" runs a quantised file's own bits, "float32" and "bfloat16" the dequantised weights, "int8" those
            rounded to 8 bits with one scale an output: another law, which is then kept as exactly. "auto" is packed on
            a CPU where the file and the native kernels allow it, else bfloat16 on a GPU, else what the folder holds.
        kernels: by name, or those of another model on the same device, which are tried already.
        pass_width: rows of every pass of a Transformers module (None: `FIXED_WIDTH`).
        fetch: download an alias that is not there yet, instead of refusing.
        progress: told of a download, of weights that are read and of layers that are filled.
        self_test: compare with Transformers' own logits and bit-compare rows among neighbours (`Target.report`).
        widen: enlarge it by this plan of `config.WIDENINGS`; the logits are compared with the original's.
        laps: told what the parts took.

    Raises:
        ModelError: one sentence with its remedy. FetchError: if a download was asked for and failed.
        KernelError: if the kernels asked for cannot run here.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    place, laps, told = resolve_device(device), laps or Laps(), progress or silent
    source = locate(model, fetch=fetch, progress=progress)
    chosen = select(kernels, place, threads) if isinstance(kernels, str) else kernels
    if self_test and isinstance(kernels, str):
        settle(chosen, place)
    laps.end("kernels")
    config = checks.read_config(source)
    tokenizer = checks.read_tokenizer(source)
    if widen is not None and dtype in ("packed", "int8"):
        raise ModelError("a widened twin has float weights: choose dtype float32 or bfloat16")
    packed = None if widen is not None else _packed(dtype, source, config, place, chosen, told)
    expected, body = None, packed
    if body is not None:
        dtype, generation = "packed", checks.read_generation_config(source)
    else:
        quantised.refuse_again(source.name, config, dtype, widen)
        dtype = float_type(dtype, source, config, place)
        module = checks.read_module(source, config, _torch_type(dtype), place, partial(told, "weights"))
        generation = module.generation_config
        if self_test and dtype != "int8":
            laps.end("weights")
            expected = reference(module, true_vocabulary(config, tokenizer))
            laps.end("checks of the model")
        if widen is not None:
            target = twin_of(source.name, widen, module, chosen, tokenizer)
        else:
            body = body_of(module, chosen, dtype, filling=Filling(consume=True, progress=told))
        del module
        if place.type == "cuda":
            torch.cuda.empty_cache()  # what the lean layers fused is not needed apart, and memory is planned next
    if body is not None:
        target = assemble(source.name, body, dtype, place, chosen, tokenizer, config, generation, pass_width)
    laps.end("weights")
    if self_test:
        target = probe(target, expected)
        laps.end("checks of the model")
    return target


def body_of(
    module: Any, kernels: Kernels, dtype: str = "auto", ranks: Ranks | None = None, filling: Filling = KEEP
) -> Model:
    """The lean layers where they compute exactly what the module does, else the module.

    On a GPU without kernels made for it the libraries' own linears, under a graph, are the faster way.

    Args:
        ranks: those that share the model, of which the module is this rank's part.

    Raises:
        ModelError: if there are no such layers for 8-bit weights. KernelError: if the kernels do not multiply those.
    """
    if dtype == "int8":
        rounded = LeanModel.from_module(module, kernels, "int8", ranks, filling)
        if rounded is None:
            kind = module.config.model_type
            raise ModelError(f"its architecture ({kind}) has no layers of int8 weights: choose dtype bfloat16")
        return rounded
    if module.device.type == "cpu" or kernels.name == "triton":
        lean = LeanModel.from_module(module, kernels, None, ranks, filling)
        if lean is not None:
            return lean
    return ModuleModel(module, kernels)


def twin_of(name: str, plan: str, module: Any, kernels: Kernels, tokenizer: Any) -> Target:
    """The widened twin of a loaded module.

    Raises:
        ModelError: if it cannot be widened so.
    """
    widening, config, dtype = widening_of(module, plan), module.config, str(module.dtype).removeprefix("torch.")
    body, vocab_size = twin_model(module, widening, kernels), true_vocabulary(config, tokenizer)
    original = Original(name, plan, config, config.hidden_size, config.num_hidden_layers, vocab_size, tokenizer)
    generation = module.generation_config
    made = assemble(name, body, dtype, module.device, kernels, tokenizer, widening.config(config), generation)
    return as_twin(made, original)


def max_positions(model: str) -> int:
    """Most positions of one request of a model, from its config alone.

    Raises:
        ModelError: if there is no such model, or it cannot be served.
    """
    return checks.longest_context(checks.read_config(locate(model)).get_text_config(decoder=True))[0]


def causal_module(model: str, device: str = "auto") -> Any:
    """The Transformers module of a model, for what is no serving: bfloat16 on a GPU, float32 on a CPU.

    Raises:
        ModelError: one sentence with its remedy.
    """
    place, source = resolve_device(device), locate(model)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    return checks.read_module(source, checks.read_config(source), dtype, place)


def blank_module(model: str) -> Any:
    """The Transformers module of a model without its weights, on the meta device: what it is made of, at no cost.

    Raises:
        ModelError: if there is no such model, or it is no causal language model.
    """
    config = checks.read_config(locate(model))
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"{model} has a config that Transformers cannot build ({checks.first_line(error)})") from error


def assemble(
    name: str,
    body: Model,
    dtype: str,
    device: torch.device,
    kernels: Kernels,
    tokenizer: Any,
    config: Any,
    generation: Any,
    pass_width: int | None = None,
) -> Target:
    """A target from its parts; settles its vocabulary, its ends and its longest context.

    pass_width: rows of every pass of a Transformers module (None: `FIXED_WIDTH`).
    """
    text = config.get_text_config(decoder=True)
    max_positions, notes = checks.longest_context(text)
    is_module = isinstance(body, ModuleModel)
    return Target(
        name=name,
        way="module" if is_module else "lean",
        dtype=dtype,
        device=device,
        model=body,
        kernels=kernels,
        tokenizer=tokenizer,
        config=config,
        vocab_size=true_vocabulary(config, tokenizer),
        eos_ids=checks.end_ids(generation, tokenizer),
        max_positions=max_positions,
        hidden_size=text.hidden_size,
        page_dtype=torch.bfloat16 if dtype in ("bfloat16", "int8") else torch.float32,
        fixed_width=(pass_width or FIXED_WIDTH) if is_module else kernels.fixed_width,
        notes=[*notes, kernels.note] if kernels.note else notes,
    )


def true_vocabulary(config: Any, tokenizer: Any) -> int:
    """Number of ids that may be emitted: the tokenizer's, where the embedding is padded beyond them."""
    return int(min(config.get_text_config(decoder=True).vocab_size, 1 + max(tokenizer.get_vocab().values())))


def resolve_device(device: str) -> torch.device:
    """ "auto" is the first GPU where there is one, else the CPU.

    Raises:
        ModelError: for a device that is not here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is unknown: give cpu, cuda or cuda:N") from error
    if place.type not in ("cpu", "cuda") or (place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count()):
        raise ModelError(
            f"device {device!r} is not here: {torch.cuda.device_count()} CUDA devices are visible, or use cpu"
        )
    return place


def locate(model: str, *, fetch: bool = False, progress: Progress | None = None) -> Source:
    """Find a model's files; nothing is downloaded but a hub id's, or an alias's with `fetch`.

    Raises:
        ModelError: if there is nothing of that name. FetchError: if a download was asked for and failed.
    """
    try:
        return _locate(model, fetch, progress)
    except PermissionError as error:
        raise ModelError(f"{model} cannot be read: check its permissions") from error


def _locate(model: str, fetch: bool, progress: Progress | None) -> Source:
    path = Path(model).expanduser()
    if model in ALIASES:
        folder = bring(model, progress) if fetch else cache_folder() / "models" / model
        if not is_whole(folder):
            raise ModelError(f"{model} is not here, or damaged: run `outrider fetch {model}`")
    elif path.is_file():
        read_header(path)
        return Source(model, None, path)
    elif model and path.is_dir():
        folder = path
    elif path.is_absolute() or model.startswith((".", "~")) or model.endswith(".gguf") or model.count("/") != 1:
        raise ModelError(f"there is no model {model!r}: give {', '.join(ALIASES)}, a folder, a .gguf file or a hub id")
    else:
        folder = _hub_folder(model)
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(folder)
    packed = folder / PACKED_FILE
    return Source(model, folder, packed if packed.is_file() else None)


def _hub_folder(model: str) -> Path:
    """The local snapshot of a hub id, downloaded where the hub is reachable."""
    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise ModelError(
            f"there is no folder {model!r}, and the hub did not give it ({checks.first_line(error)}): check the name, "
            "or the network"
        ) from error


def _packed(
    dtype: str, source: Source, config: Any, device: torch.device, kernels: Kernels, progress: Progress
) -> Model | None:
    """The model on its file's own bits, where that is asked for, or possible and "auto"."""
    if dtype not in ("packed", "auto"):
        return None
    packable = source.gguf is not None and device.type == "cpu" and read_header(source.gguf).is_packable
    body = None
    if source.gguf is not None and packable and (dtype == "packed" or kernels.name == "native"):
        body = LeanModel.from_gguf(source.gguf, config, kernels, progress)
    if body is None and dtype == "packed":
        reason = (
            f"its architecture ({config.model_type}) has no packed layers"
            if packable
            else ("packed weights run on a CPU" if device.type != "cpu" else "it holds no Q4_0, Q4_1 or Q8_0 weights")
        )
        raise ModelError(f"{source.name} cannot run packed, {reason}: choose dtype float32 or bfloat16")
    return body


def float_type(dtype: str, source: Source, config: Any, device: torch.device) -> str:
    """What "auto" is where nothing runs packed: bfloat16 on a GPU, else what the folder holds."""
    if dtype != "auto":
        return dtype
    holds_bfloat16 = source.gguf is None and config.dtype == torch.bfloat16
    return "bfloat16" if device.type == "cuda" or holds_bfloat16 else "float32"


def _torch_type(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "float32" else torch.bfloat16
