"""`outrider doctor`: what this machine has, what works on it, and with a model how exact its arithmetic is."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider import __version__
from outrider.cli.options import Json, Settings, takes
from outrider.cli.render import print_json
from outrider.cli.session import session
from outrider.config import EngineConfig, cache_folder
from outrider.errors import OutriderError
from outrider.measure.prompts import load_prompts
from outrider.registry import DRAFTERS

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "gguf")
FOUND = ("probe", "drafter_probe", "notes")
"""What loading found out about a model, beside the decisions that followed."""


@takes(EngineConfig)
def doctor(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Load it and report on it too.")] = None,
    *,
    settings: Settings,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Texts for the numerics, as `check` reads them; else built-in.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="At most this many texts.")] = None,
    as_json: Json = False,
) -> None:
    """Say what works here: device, versions, compiler, kernels and self-test; with a model its memory and numerics.

    Numerics: how far the model's law, in the dtype in use, lies from the same weights in float32.
    """
    texts = load_prompts(prompts, limit)
    EngineConfig.of(model=model or "", **settings.engine)
    lines: list[str] = []
    memory: dict[str, str] = {}
    report: dict[str, Any] = {"machine": machine(), "kernels": kernels("cpu", settings.engine.get("threads"))}
    if len(report["machine"]["devices"]) > 1:
        report["gpu_kernels"] = kernels("cuda")
    if model is not None:
        with session(model, settings.engine) as llm:
            report["model"] = llm.describe()
            lines, memory = llm.resolved.lines(), llm.resolved.memory.table()
            # As they stand: a chat template, the same in every text, would count once a text.
            ids = [llm.encode(text.content, raw=True) for text in texts]
            report["numerics"] = numerics(llm, settings.engine, ids)
    if as_json:
        print_json(report)
        return
    if model is not None:
        # A person reads the decisions as sentences; what only the JSON form holds as well is left out here.
        report["model"] = {"decided": lines, "memory": memory, **{name: report["model"].get(name) for name in FOUND}}
    _show(report, Console(highlight=False, soft_wrap=True))


def machine() -> dict[str, Any]:
    """Processor, devices, versions, compiler and cache folder."""
    import torch

    folder = cache_folder()
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    compilers = (shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": ["cpu", *devices],
        "versions": {"outrider": __version__, **{name: _version(name) for name in PACKAGES}},
        "compiler": next((path for path in compilers if path), None),
        "cache_folder": str(folder),
        "drafters": list(DRAFTERS),
    }


def kernels(device: str, threads: int | None = None) -> dict[str, Any]:
    """Which kernel set serves a device here, and what its self-test found."""
    import torch

    from outrider.kernels import select, self_test, settle

    place = torch.device(device)
    try:
        chosen = select("auto", place, threads)
    except OutriderError as error:
        return {"name": None, "problem": str(error)}
    settle(chosen, place)
    outcomes = self_test(chosen, place)
    found = {
        "name": chosen.name,
        "fixed_width": chosen.fixed_width,
        **_tiles(chosen),
        "self_test": {outcome.kernel: "passed" if outcome.passed else outcome.detail for outcome in outcomes},
    }
    return {**found, "note": chosen.note} if chosen.note else found


def _tiles(kernels: Any) -> dict[str, str]:
    """Of a GPU's kernels: whether tiles were found equal in their bits, so that each width takes its fastest."""
    if kernels.name != "triton":
        return {}
    one = [name for name, tile in (("linears", kernels.tile), ("attention", kernels.queries)) if tile is not None]
    return {"tiles": f"{' and '.join(one)} kept to one: their bits differ" if one else "equal in every bit"}


def numerics(llm: Any, engine: Mapping[str, Any], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The target in use against the same weights, dequantised where they are packed, in float32."""
    from outrider.measure.divergence import divergence
    from outrider.models.loader import load

    target = llm.engine.target
    if target.dtype == "float32":
        return {"arithmetic": target.numerics, "against": "nothing: this is the reference"}
    same = {name: engine[name] for name in ("device", "kernels", "threads") if name in engine}
    reference = load(llm.config.model, dtype="float32", **same)
    found = divergence(target, reference, texts)
    return {"arithmetic": target.numerics, "against": reference.numerics, **found.to_json()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _show(report: Mapping[str, Any], console: Console, indent: int = 0) -> None:
    """Print nested facts, one a line; nothing here depends on which facts there are."""
    for key, value in report.items():
        label = " " * indent + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            console.print(label, style="bold" if indent == 0 else "", markup=False)
            _show(value, console, indent + 2)
        elif isinstance(value, (list, tuple)) and len(value) > 1 and all(isinstance(v, str) for v in value):
            console.print(label, markup=False)
            for line in value:
                console.print(" " * (indent + 2) + line, markup=False)
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            console.print(f"{label}: {'none' if shown in (None, '') else shown}", markup=False)
