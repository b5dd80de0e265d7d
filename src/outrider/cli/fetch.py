"""`outrider fetch`: brings a model by its alias into the cache folder, once, checked."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.options import Json
from outrider.cli.render import print_json, progress_bar, write


def fetch(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The model's short name; see the README's table.")],
    as_json: Json = False,
) -> None:
    """Bring a model into the cache folder (OUTRIDER_CACHE, else ~/.cache/outrider) and print where it lies."""
    from outrider.models.fetch import fetch as bring

    with progress_bar(f"fetching {alias}") as update:
        folder = bring(alias, update)
    if as_json:
        print_json({"model": alias, "path": str(folder)})
    else:
        write(f"{folder}\n")
