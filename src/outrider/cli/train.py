"""`outrider train`: a drafter of your own: the target's replies, the training, the proof and the speed, in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import Json, PromptFiles, Settings, takes
from outrider.cli.proof import SERVED_DEPTH, Served
from outrider.cli.provenance import provenance
from outrider.cli.render import notes, print_json, write
from outrider.cli.replies import generate, plain_engine, read_all
from outrider.cli.session import fetch_if_missing
from outrider.errors import ConfigError, TrainingError
from outrider.measure.prompts import Prompt
from outrider.registry import TRAINED, unknown
from outrider.training.card import card
from outrider.training.reply_settings import ReplySettings
from outrider.training.settings import TrainConfig

DEFAULT_SECONDS = 1800.0
DEFAULT_REPLY_TOKENS = 20_000_000


@dataclass(frozen=True, slots=True)
class _Job:
    """One call of `train`: what is made of which target, where it goes, and on which device it is measured."""

    drafter: str
    target: str
    out: Path
    device: str

    @property
    def candidate(self) -> Path:
        """The drafter as it is now, for the engine to serve."""
        return self.work / "candidate"

    @property
    def work(self) -> Path:
        return self.out.with_name(self.out.name + ".work")

    @property
    def served(self) -> Served:
        return Served(self.drafter, self.target, self.candidate, self.device)


@takes(TrainConfig)
def train(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help=f"One of {', '.join(TRAINED)}.")],
    *,
    target: Annotated[str, typer.Option(metavar="MODEL", help="Alias, folder, .gguf file or hub id of the target.")],
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Where the drafter is written; DIR.work holds what it needs.")
    ],
    settings: Settings,
    prompts: PromptFiles = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Replies that `outrider replies` made already; may be repeated."),
    ] = None,
    reply_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of replies to make where no corpus is given.")
    ] = DEFAULT_REPLY_TOKENS,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="A size of the drafter, such as num_layers=3.")
    ] = None,
    start_from: Annotated[
        str | None, typer.Option(metavar="DIR", help="A trained drafter of the same kind to go on from.")
    ] = None,
    measure_on: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where the drafter is checked and timed: cpu, cuda or auto.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Train a drafter on what the target itself says, check that it changes no text, and measure what it brings.

    Without --prompts the target makes up its own. A run that was killed goes on where it was, with the same command.
    """
    problem = unknown("drafter to train", [drafter], list(TRAINED))
    if problem:
        raise ConfigError(problem)
    given = dict(settings.training)
    if "steps" not in given and "seconds" not in given:
        given["seconds"] = DEFAULT_SECONDS
    config = TrainConfig(**given)
    sizes = dict(_size(text) for text in shape or [])
    if prompts and corpus:
        raise ConfigError("prompts are for replies that are yet to be made: leave out prompts, or corpus")
    job = _Job(drafter, target, _place(out), measure_on)
    asked = read_all(prompts)
    wanted = ReplySettings(num_tokens=reply_tokens)
    _refuse_early(job, sizes, start_from)
    fetch_if_missing(target)
    _rehearse(job, sizes)
    folders = [Path(folder) for folder in corpus] if corpus else [_replies(job, asked, wanted)]
    told = _train(job, folders, config, sizes, start_from)
    if told is None:  # another process of the same run tells
        return
    if as_json:
        print_json(told)
    else:
        seen = told["figures"]
        write(
            f"{out}: tau {seen['served']['tau']:.2f} at depth {SERVED_DEPTH}, "
            f"{seen['speed']['ratio_to_plain']:.2f}x plain decoding, {seen['check']['differing']} texts differ\n"
        )


def _refuse_early(job: _Job, sizes: Mapping[str, Any], start_from: str | None) -> None:
    """What would end the run only after hours of replies and training.

    Raises:
        OutriderError: for a device that is not here, a size that this drafter has not, or nothing to begin with.
    """
    from outrider.models.heads import files
    from outrider.models.loader import resolve_device
    from outrider.training.base import refuse_unknown

    resolve_device(job.device)
    refuse_unknown(TRAINED[job.drafter], sizes)
    if start_from is not None:
        files.read(files.locate(start_from), job.drafter)


def _rehearse(job: _Job, sizes: Mapping[str, Any]) -> None:
    """Build the drafter for the target without weights: what cannot be built is refused before any reply is made.

    Raises:
        OutriderError: for a target that this drafter cannot learn from, or sizes that do not fit it.
    """
    import torch

    from outrider.models.loader import blank_module
    from outrider.training.base import build

    build(TRAINED[job.drafter], blank_module(job.target), torch.arange(2), dict(sizes), None)


def _replies(job: _Job, asked: list[Any] | None, settings: ReplySettings) -> Path:
    """The corpus of this run, made by all its processes together; whole already where the run goes on."""
    from outrider.training.processes import rank_and_world, wait_for_all

    folder = job.work / "corpus"
    rank, world = rank_and_world()
    with plain_engine(job.target, {}) as llm:
        generate(llm, asked, folder, settings, rank, world)
    wait_for_all()
    return folder


def _train(
    job: _Job, folders: Sequence[Path], config: TrainConfig, sizes: Mapping[str, Any], start_from: str | None
) -> dict[str, Any] | None:
    """Train, prove, measure, write; the provenance, or None in every process but the first."""
    from outrider.models.heads import files, wiring
    from outrider.models.loader import causal_module, load
    from outrider.training.corpus import Corpus
    from outrider.training.loop import train as run
    from outrider.training.processes import rank_and_world
    from outrider.training.shards import combined

    console = notes()
    data = combined(folders)
    engine_target = load(job.target, self_test=False)
    described = {**files.describe_target(engine_target), **wiring.signature(engine_target)}
    for made in data["settings"]:
        if made.get("vocabulary_sha256", described["vocabulary_sha256"]) != described["vocabulary_sha256"]:
            raise TrainingError(
                f"the corpus was made by {made['model']}, whose ids mean something else than those of {job.target}: "
                "make replies with the target itself"
            )
    initial = None
    if start_from is not None:
        artefact = files.read(files.locate(start_from), job.drafter)
        files.check_target(artefact, engine_target)
        initial = artefact.tensors
    found = Corpus.read(folders, config.max_length)
    held_out = [Prompt(f"held-out:{i}", ids) for i, ids in enumerate(found.held_out_prompts(config.held_out, 16))]

    def serve(trained: Any) -> dict[str, Any]:
        _write(job.candidate, *_parts(job, described, trained), {}, "")
        return job.served.tau(held_out)

    def tell(report: Any) -> None:
        figures = {k: v for k, v in report.figures.items() if isinstance(v, float)}
        words = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        console.print(f"{report.event} {report.done}/{report.horizon or '?'}: {words}{report.note}", markup=False)

    trained = run(
        job.drafter,
        causal_module(job.target),
        found,
        config,
        work=job.work / "checkpoints",
        vocab_size=engine_target.vocab_size,
        eos_ids=engine_target.eos_ids,
        settings=sizes,
        initial=initial,
        progress=tell,
        measure=serve,
    )
    if rank_and_world()[0]:
        return None
    _write(job.candidate, *_parts(job, described, trained), {}, "")
    told = provenance(job.drafter, described, data, trained, job.served.prove(held_out))
    _write(job.out, *_parts(job, described, trained), told, card(told))
    return told


def _parts(job: _Job, described: Mapping[str, Any], trained: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """What an artefact holds: its config and its tensors."""
    return {"drafter": job.drafter, "target": dict(described), **trained.settings}, trained.tensors


def _write(folder: Path, *parts: Any) -> None:
    """Write a drafter, whole; `parts` as `files.write` takes them.

    Raises:
        TrainingError: if the disk is full; checkpoints and data stay.
    """
    from outrider.models.heads import files

    try:
        files.write(folder, *parts)
    except OSError as error:
        raise TrainingError(
            f"{folder} cannot be written ({error.strerror}): make room and run the same command again"
        ) from error


def _place(out: str) -> Path:
    """The folder to be written; a link stays and leads to it.

    Raises:
        ConfigError: if something is there that would be lost.
    """
    from outrider.models.heads.files import may_be_written

    folder = Path(out).expanduser().resolve()
    if not out or not folder.name or not may_be_written(folder):
        raise ConfigError(f"out={out!r} is not free: name a new folder, or a trained drafter that is to be replaced")
    return folder


def _size(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not (equals and value.isascii() and value.isdigit() and int(value)):
        raise ConfigError(
            f"--shape {text!r} is not NAME=N: give a size and a whole number above 0, such as num_layers=3"
        )
    return name, int(value)
