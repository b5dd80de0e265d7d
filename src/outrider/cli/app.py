"""The verbs, in the order in which a newcomer meets them."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider import __version__
from outrider.cli import (
    advise,
    bench,
    chat,
    check,
    demo,
    deploy,
    doctor,
    export,
    fetch,
    generate,
    load,
    prove,
    replies,
    report,
    serve,
    train,
)

app = typer.Typer(
    name="outrider",
    help="Exact speculative decoding for Transformers models: the same text, token for token, sooner.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact speculative decoding for Transformers models: the same text, token for token, sooner."""


for verb in (
    demo.demo,
    fetch.fetch,
    generate.generate,
    chat.chat,
    serve.serve,
    deploy.deploy,
    load.load,
    check.check,
    bench.bench,
    advise.advise,
    report.report,
    doctor.doctor,
    replies.replies,
    train.train,
    prove.prove,
    export.export,
):
    app.command()(verb)
