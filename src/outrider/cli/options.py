"""Command-line options made from the dataclasses they fill: names, defaults and help are written there, once."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any

import typer

from outrider.config import ACCEPTANCE, DTYPES, OBJECTIVES, WIDENINGS, EngineConfig
from outrider.deploy.settings import DeployConfig
from outrider.errors import ConfigError, RequestError
from outrider.registry import DRAFTERS
from outrider.request import LogprobsMode, SamplingParams
from outrider.server.settings import ServeConfig, keys_in
from outrider.training.reply_settings import ReplySettings
from outrider.training.settings import LOSSES, OPTIMIZERS, TrainConfig

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Alias, folder, .gguf file or hub id.")]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; `-` reads it from standard input.")]
PromptFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="JSON lines with prompt, messages or turns; built-in ones if left out."),
]
PromptFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="JSON lines with prompt, question, messages or turns; may be repeated; built-in ones if left out.",
    ),
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="At most this many prompts.")]
MaxTokens = Annotated[int, typer.Option(metavar="N", help="Completion tokens a prompt.")]
Raw = Annotated[bool, typer.Option("--raw", help="Leave the prompt as it is: no chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]

METAVARS = {int: "N", float: "X", str: "TEXT", bool: None, LogprobsMode: "NAME"}
CHOICES = {
    "drafter": ("auto", "none", *DRAFTERS),
    "dtype": DTYPES,
    "acceptance": ACCEPTANCE,
    "objective": OBJECTIVES,
    "widen": WIDENINGS,
    "logprobs_mode": tuple(LogprobsMode),
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
}
REPEATED = {
    "logit_bias": ("--logit-bias", "ID=VALUE", str),
    "bad_words": ("--bad-word", "TEXT", str),
    "stop": ("--stop", "TEXT", str),
    "stop_token_ids": ("--stop-token-id", "ID", int),
}
# An automaton is an object, a trace is for a server, and what bounds the guesses of the only request is the engine's.
NOT_OPTIONS = {
    EngineConfig: {"model"},
    SamplingParams: {"automaton", "depth", "width", "trace"},
    ReplySettings: {"temperatures"},
}
PANELS = {
    EngineConfig: "Engine",
    SamplingParams: "Sampling",
    TrainConfig: "Training",
    ReplySettings: "Replies",
    ServeConfig: "Server",
    DeployConfig: "Deployment",
}
SOURCES = {
    EngineConfig: "engine",
    SamplingParams: "sampling",
    TrainConfig: "training",
    ReplySettings: "replies",
    ServeConfig: "serve",
    DeployConfig: "deploy",
}
"""Under which name of `Settings` the keywords of a dataclass arrive."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What was given on the command line, defaults left out: keywords of each dataclass in `SOURCES`."""

    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    replies: dict[str, Any] = field(default_factory=dict)
    serve: dict[str, Any] = field(default_factory=dict)
    deploy: dict[str, Any] = field(default_factory=dict)

    def params(self) -> SamplingParams:
        """The sampling parameters.

        Raises:
            RequestError: for a value that cannot be honoured.
        """
        given = {name: tuple(value) if name in REPEATED else value for name, value in self.sampling.items()}
        if "logit_bias" in given:
            given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"])
        return SamplingParams.of(**given)


def takes(*sources: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb one option for every field of the dataclasses; it receives them as `settings: Settings`."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        made = {source: list(_options(source)) for source in sources}
        own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.name != "settings"]

        @functools.wraps(verb)
        def wrapper(**values: Any) -> None:
            given = {
                source: {p.name: v for p in parameters if (v := values.pop(p.name)) not in (None, [])}
                for source, parameters in made.items()
            }
            verb(**values, settings=Settings(**{SOURCES[source]: found for source, found in given.items()}))

        parameters = [*own, *(p for parameters in made.values() for p in parameters)]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for `-`.

    Raises:
        RequestError: for an empty prompt, or bytes that are not UTF-8.
    """
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text (byte {error.start}): convert it first") from error
    if not prompt:
        raise RequestError("the prompt is empty: give a text, or `-` to read one from standard input")
    return prompt


def read_key(file: str | None, option: str = "api_key_file") -> str | None:
    """A server's key: the first one of a file, as `serve` reads it; None without one.

    Raises:
        ConfigError: it cannot be read, or holds no key that a header can carry.
    """
    if file is None:
        return None
    key = keys_in(file, option)[0]
    if not all(32 <= byte < 127 for byte in key):
        raise ConfigError(f"{option}={file!r} holds no key: give one of plain letters, digits and signs")
    return key.decode()


def described(source: type) -> dict[str, str]:
    """Field names to their sentences in the `Attributes:` section of a dataclass's docstring."""
    section = inspect.cleandoc(source.__doc__ or "").partition("Attributes:")[2]
    text = " ".join(section.split())
    name = "|".join(f.name for f in fields(source))
    heads = list(re.finditer(rf"(?:^|(?<=\s))((?:{name})(?:, (?:{name}))*): ", text))
    found: dict[str, str] = {}
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        sentence = text[head.end() : following.start() if following else len(text)].strip()
        found |= dict.fromkeys(head[1].split(", "), sentence)
    return found


def _options(source: type) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(source)
    sentences = described(source)
    for entry in fields(source):
        if entry.name not in NOT_OPTIONS.get(source, ()):
            yield _option(entry, hints[entry.name], sentences[entry.name], PANELS[source])


def _option(entry: Field[Any], hint: Any, sentence: str, panel: str) -> inspect.Parameter:
    flag, kind = "--" + entry.name.replace("_", "-"), _plain_type(hint)
    metavar = METAVARS.get(kind)
    sentence = sentence[:1].upper() + sentence[1:]
    if entry.name in REPEATED:
        flag, metavar, item = REPEATED[entry.name]
        kind, sentence = list[item], f"{sentence} May be repeated."  # type: ignore[valid-type]
    elif kind is bool:
        flag = f"{flag}/--no-{flag[2:]}" if entry.default is not False else flag
    elif entry.name in CHOICES:
        metavar, sentence = "NAME", f"{sentence} One of {', '.join(CHOICES[entry.name])}."
    if kind is not bool and entry.default is not MISSING and entry.default not in (None, ()):
        sentence = f"{sentence} Default: {entry.default}."
    option = typer.Option(flag, help=sentence, metavar=metavar, rich_help_panel=panel, show_default=False)
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _plain_type(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    try:
        if equals:
            return int(token), float(value)
    except ValueError:
        pass
    raise RequestError(f"--logit-bias {text!r} is not ID=VALUE: give a token id and a number, such as 42=-100")
