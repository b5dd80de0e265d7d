"""`outrider train`: a drafter of your own: the target's replies, the training, the proof and the speed, in one run."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import Json, PromptFiles, Settings, takes
from outrider.cli.render import notes, print_json, write
from outrider.cli.replies import generate, plain_engine, read_all
from outrider.cli.session import fetch_if_missing
from outrider.errors import ConfigError, TrainingError
from outrider.measure.bench import PLAIN, bench, ours
from outrider.measure.lossless import check
from outrider.measure.prompts import Prompt
from outrider.record import Tally
from outrider.registry import TRAINED, unknown
from outrider.request import SamplingParams
from outrider.training.card import card
from outrider.training.reply_settings import ReplySettings
from outrider.training.settings import TrainConfig

SERVED_DEPTH = 5
SERVED_TOKENS = 96
"""Completion tokens of each held-out prompt that the engine is measured with."""
DEFAULT_SECONDS = 1800.0
DEFAULT_REPLY_TOKENS = 20_000_000


@dataclass(frozen=True, slots=True)
class _Job:
    """One call of `train`: what is made of which target, where everything lies, and on which device it is measured."""

    drafter: str
    target: str
    out: Path
    work: Path
    device: str

    @property
    def candidate(self) -> Path:
        """The drafter as it is now, for the engine to serve."""
        return self.work / "candidate"

    def settings(self, drafter: str) -> dict[str, Any]:
        named = {"drafter_model": str(self.candidate)} if drafter == self.drafter else {}
        return {"drafter": drafter, "device": self.device, "prefix_cache": False, **named}


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
    job = _Job(drafter, target, Path(out), Path(out).with_name(Path(out).name + ".work"), measure_on)
    asked = read_all(prompts)
    fetch_if_missing(target)
    folders = [Path(folder) for folder in corpus] if corpus else [_replies(job, asked, reply_tokens)]
    provenance = _train(job, folders, config, sizes, start_from)
    if provenance is None:  # another process of the same run tells
        return
    if as_json:
        print_json(provenance)
    else:
        seen = provenance["figures"]
        write(
            f"{out}: tau {seen['served']['tau']:.2f} at depth {SERVED_DEPTH}, "
            f"{seen['speed']['ratio_to_plain']:.2f}x plain decoding, {seen['check']['differing']} texts differ\n"
        )


def _replies(job: _Job, asked: list[Any] | None, tokens: int) -> Path:
    """The corpus of this run, made by all its processes together; whole already where the run goes on."""
    from outrider.training.processes import rank_and_world, wait_for_all

    folder = job.work / "corpus"
    rank, world = rank_and_world()
    with plain_engine(job.target, {}) as llm:
        generate(llm, asked, folder, ReplySettings(num_tokens=tokens), rank, world)
    wait_for_all()
    return folder


def _train(
    job: _Job, folders: Sequence[Path], config: TrainConfig, sizes: Mapping[str, Any], start_from: str | None
) -> dict[str, Any] | None:
    """Train, prove, measure, write; the provenance, or None in every process but the first."""
    from outrider.models.heads import files
    from outrider.models.loader import causal_module, load
    from outrider.training.corpus import Corpus
    from outrider.training.loop import train as run
    from outrider.training.processes import rank_and_world

    console = notes()
    engine_target = load(job.target, self_test=False)
    described = files.describe_target(engine_target)
    initial = None
    if start_from is not None:
        artefact = files.read(files.locate(start_from), job.drafter)
        files.check_target(artefact, engine_target)
        initial = artefact.tensors
    found = Corpus.read(folders, config.max_length)
    held_out = [Prompt(f"held-out:{i}", ids) for i, ids in enumerate(found.held_out_prompts(config.held_out, 16))]

    def serve(trained: Any) -> dict[str, Any]:
        _write(job, described, trained, {})
        return _served(job, held_out)

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
    _write(job, described, trained, {})
    provenance = _provenance(job, described, folders, trained, _proof(job, held_out))
    files.write(job.out, *_parts(job, described, trained), provenance, card(provenance))
    return provenance


def _parts(job: _Job, described: Mapping[str, Any], trained: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """What an artefact holds: its config and its tensors."""
    return {"drafter": job.drafter, "target": dict(described), **trained.settings}, trained.tensors


def _write(job: _Job, described: Mapping[str, Any], trained: Any, provenance: Mapping[str, Any]) -> None:
    """Put the drafter where the engine can serve it.

    Raises:
        TrainingError: if the disk is full; checkpoints and data stay.
    """
    from outrider.models.heads import files

    try:
        files.write(job.candidate, *_parts(job, described, trained), provenance, "")
    except OSError as error:
        raise TrainingError(
            f"{job.candidate} cannot be written ({error.strerror}): make room and run the same command again"
        ) from error


def _served(job: _Job, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Tau by the real engine, greedy, guessing in every cycle."""
    from outrider import LLM

    settings = {**job.settings(job.drafter), "depth": SERVED_DEPTH, "width": 1, "adaptive": False, "self_test": False}
    llm = LLM(job.target, **settings)
    try:
        params = SamplingParams(max_tokens=SERVED_TOKENS, seed=0)
        tally = Tally()
        for result in llm.generate([prompt.content for prompt in prompts], params):
            tally.add(result.tally)
    finally:
        llm.close()
    return {"tau": tally.tau or 1.0, "depth": SERVED_DEPTH, "cycles": tally.cycles, "accepted": tally.accepted}


def _proof(job: _Job, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Served tau, `check`, and the speed against plain decoding, on held-out prompts.

    Raises:
        TrainingError: if a text differs; then nothing is written.
    """
    from outrider import LLM

    def open_llm(name: str) -> Any:
        return LLM(job.target, **job.settings(name))

    with notes().status("checking and measuring"):
        served = _served(job, prompts)
        report = check(
            open_llm, [job.drafter], prompts, temperatures=(0.0, 1.0), max_tokens=SERVED_TOKENS, batched=True
        )
        if report.differing:
            raise TrainingError(
                f"{report.differing} of {report.compared} texts changed with the new drafter, which must never be: it "
                f"is not written; {job.candidate} holds it, for a report of this fault"
            )
        plain, llm = open_llm("none"), open_llm(job.drafter)
        try:
            params = SamplingParams(max_tokens=SERVED_TOKENS, seed=0)
            figures = bench({PLAIN: ours(plain, params), job.drafter: ours(llm, params)}, prompts, SERVED_TOKENS)
            device = str(llm.engine.target.device)
        finally:
            plain.close()
            llm.close()
    speed = figures[job.drafter].to_json(figures[PLAIN])
    checked = {"compared": report.compared, "differing": report.differing}
    return {"served": served, "check": checked, "speed": {**speed, "device": device}}


def _provenance(
    job: _Job, described: Mapping[str, Any], folders: Sequence[Path], trained: Any, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Where the drafter comes from, and what it was seen to do."""
    import torch

    from outrider.engine.resolve import versions
    from outrider.training.shards import combined

    on_gpu = torch.cuda.is_available()
    return {
        "drafter": job.drafter,
        "target": dict(described),
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else "a CPU",
        "versions": versions(),
        "data": combined(folders),
        "training": trained.figures,
        "figures": dict(figures),
        "curve": trained.curve,
    }


def _commit() -> str:
    """The checkout's commit, where there is one."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _size(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not (equals and value.isdigit()):
        raise ConfigError(f"--shape {text!r} is not NAME=N: give a size and a whole number, such as num_layers=3")
    return name, int(value)
