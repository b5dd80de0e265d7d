"""`outrider prove`: checks and measures a trained drafter anew, on this machine, and renews its card."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from outrider.cli.options import Json, Limit, PromptFiles
from outrider.cli.proof import SERVED_DEPTH, Served
from outrider.cli.provenance import today
from outrider.cli.render import print_json, write
from outrider.cli.session import fetch_if_missing
from outrider.errors import ModelError
from outrider.measure.prompts import load_prompts
from outrider.training.card import card


def prove(
    drafter: Annotated[str, typer.Argument(metavar="DIR", help="Folder or alias of a trained drafter.")],
    *,
    target: Annotated[str, typer.Option(metavar="MODEL", help="Alias, folder, .gguf file or hub id of its target.")],
    prompts: PromptFiles = None,
    limit: Limit = 16,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or auto.")] = "auto",
    as_json: Json = False,
) -> None:
    """Check a trained drafter, measure what it brings here, and renew its provenance and its model card."""
    from outrider.models.heads import files, wiring
    from outrider.models.loader import load

    folder = files.locate(drafter)
    asked = load_prompts(prompts, limit)
    try:
        told = json.loads((folder / "provenance.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} has no provenance.json to renew: train the drafter again") from error
    fetch_if_missing(target)
    artefact = files.read(folder)
    served = load(target, device=device, self_test=False)
    files.check_target(artefact, served)
    described = dict(artefact.config["target"])
    doubts = wiring.doubts(artefact.drafter, described, served)
    if doubts is None:  # one of an earlier version gets what it lacks
        described |= wiring.signature(served)
    told["target"] = described
    proved = Served(artefact.drafter, target, folder, device).prove(asked)
    told["figures"] = {**proved, "date": today(), "doubts": doubts or []}
    config = {**artefact.config, "target": described}
    files.write(folder, config, artefact.tensors, told, card(told))
    if as_json:
        print_json(told["figures"])
    else:
        seen = told["figures"]
        write(
            f"{folder}: tau {seen['served']['tau']:.2f} at depth {SERVED_DEPTH}, "
            f"{seen['speed']['ratio_to_plain']:.2f}x plain decoding, {seen['check']['differing']} texts differ\n"
            + "".join(f"{doubt}\n" for doubt in seen["doubts"])
        )
