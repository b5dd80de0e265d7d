"""The target's own replies as a corpus to train on: to given prompts, or to user turns that it makes up itself.

A drafter learns what its target says, so its data is what the target said: at several temperatures, since it is asked
at several. Without prompts the target is given its chat template up to where a user's words would begin and writes them
itself (Magpie, arXiv:2406.08464).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.llm import LLM, Ask
from outrider.request import FinishReason, SamplingParams
from outrider.result import Result
from outrider.training.shards import Conversation, Shard, read_written, summarise, write_shard

Messages = list[dict[str, str]]

TURN_TOKENS = 256
"""Most tokens of a user turn; one that has not ended by then is left out."""
PROGRESS_SECONDS = 1.0


class Prompt(Protocol):
    """What is asked: a text, or the messages of a conversation."""

    @property
    def content(self) -> str | Messages: ...


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """What is generated, and when it is enough.

    Attributes:
        num_tokens: stop at so many reply tokens, of all ranks together; prompts are asked again, with other noise,
            until then (None: every prompt once). seconds: stop after so long (None: no limit).
        max_tokens: most tokens of a reply. temperatures: pairs of a temperature and its share of the conversations.
        follow_up: share of the conversations that go on for a second turn of a user, made up by the target.
        seed: of all noise. shard_tokens: tokens of a shard, and so what a kill can lose.
    """

    num_tokens: int | None = None
    seconds: float | None = None
    max_tokens: int = 384
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.3), (0.7, 0.3), (1.0, 0.4))
    follow_up: float = 0.0
    seed: int = 0
    shard_tokens: int = 1 << 19

    def __post_init__(self) -> None:
        for name in ("num_tokens", "seconds", "max_tokens", "shard_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r} is out of range: give a number above 0")
        if not 0 <= self.follow_up <= 1:
            raise ConfigError(f"follow_up={self.follow_up!r} is out of range: give a share in [0, 1]")
        if not self.temperatures or any(heat < 0 or share <= 0 for heat, share in self.temperatures):
            raise ConfigError(f"temperatures={self.temperatures!r}: give pairs of a temperature and a share above 0")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank has got in this run."""

    conversations: int
    reply_tokens: int
    seconds: float


@dataclass(eq=False, slots=True)
class _Job:
    """One conversation on its way: what was said so far, and what of it is kept.

    Attributes:
        content: a text to go on from as it is, or messages. asks_turn: the target is writing the user's words now.
        ids: token ids of the prompt that is being replied to.
    """

    number: int
    temperature: float
    content: str | Messages
    asks_turn: bool
    ids: tuple[int, ...] = ()
    kept: list[Conversation] = field(default_factory=list)


def generate_replies(
    llm: LLM,
    prompts: Iterable[Prompt] | None,
    folder: str | Path,
    settings: ReplySettings,
    *,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Fill a folder with shards of conversations (`shards.write_shard`) until there is enough.

    A conversation depends on the settings, the prompts and its job's number alone, so a run that was killed goes on
    where its last shard ended, and `world` processes may share a folder, each with its `rank`.

    Args:
        llm: plain decoding (`drafter="none"`) with many requests and a wide pass is fastest.
        prompts: None lets the target make up its own.

    Returns:
        What `corpus.json` says of all shards that are there.

    Raises:
        ConfigError: no prompts, a folder of other settings, a full disk (what was written stays), or nothing to keep.
    """
    asked = None if prompts is None else [prompt.content for prompt in prompts]
    if asked == []:
        raise ConfigError("there are no prompts: give at least one, or none at all to let the target make up its own")
    if asked is None and settings.num_tokens is None and settings.seconds is None:
        raise ConfigError("without prompts there is no end: give num_tokens or seconds")
    if not 0 <= rank < world:
        raise ConfigError(f"rank={rank} is none of {world} processes: ranks lie in 0 .. {world - 1}")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): choose another folder") from error
    run = _Run(llm, asked, folder, settings, rank, world)
    run.go(progress)
    found = summarise(folder)
    if not found["shards"]:
        raise ConfigError(f"no reply could be kept ({run.problem or 'the time was too short'}): check the prompts")
    return found


class _Run:
    """One rank's run: hands jobs to the engine, takes results, writes shards."""

    def __init__(
        self, llm: LLM, asked: list[str | Messages] | None, folder: Path, settings: ReplySettings, rank: int, world: int
    ) -> None:
        self.problem: str | None = None
        self._llm, self._asked, self._folder, self._settings = llm, asked, folder, settings
        self._rank, self._world = rank, world
        self._described = _describe(llm, asked, settings)
        self._shard = Shard()
        self._ready: deque[_Job] = deque()
        self._done: set[int] = set()
        self._seen_prompts: set[int] = set()
        self._number = rank
        kept = 0
        for written in read_written(folder):
            _refuse_other_settings(folder, written.settings, self._described)
            self._done.update(written.jobs)
            self._seen_prompts.update(written.prompt_digests)
            if written.number % world == rank:
                self._number = written.number + world
                kept += written.counts["reply_tokens"]
        total = settings.num_tokens
        self._missing = None if total is None else -(-total // world) - kept
        self._new = self._jobs()

    def go(self, progress: Callable[[Progress], None] | None) -> None:
        """Generate until there is enough; what is finished is written even where an error ends the run."""
        started = told = time.monotonic()
        conversations = tokens = 0
        try:
            for job, result in self._llm.generate_from(self._next) if self._is_short(tokens) else ():
                for conversation in self._take(job, result):
                    self._shard.add(conversation)
                    conversations += 1
                    tokens += len(conversation.reply)
                now = time.monotonic()
                if progress is not None and now - told >= PROGRESS_SECONDS:
                    told = now
                    progress(Progress(conversations, tokens, now - started))
                if self._shard.num_tokens >= self._settings.shard_tokens:
                    self._write()
                if not self._is_short(tokens) or now - started > (self._settings.seconds or float("inf")):
                    break
        finally:
            self._write()
        if progress is not None:
            progress(Progress(conversations, tokens, time.monotonic() - started))

    def _is_short(self, tokens: int) -> bool:
        return self._missing is None or tokens < self._missing

    def _write(self) -> None:
        if self._shard.conversations:
            shard, self._shard = self._shard, Shard()
            write_shard(self._folder, self._number, shard, self._described)
            self._number += self._world

    def _jobs(self) -> Iterator[_Job]:
        """This rank's jobs that no shard holds yet."""
        for number in count(self._rank, self._world):
            epoch = 0 if self._asked is None else number // len(self._asked)
            if epoch and (self._missing is None or not any(heat for heat, _ in self._settings.temperatures)):
                return  # every prompt was asked once, and a greedy reply would only come again
            if number not in self._done:
                heat = self._temperature(number, again=epoch > 0)
                content = [] if self._asked is None else self._asked[number % len(self._asked)]
                templated = isinstance(content, str) and self._llm.tokenizer.chat_template
                messages = [{"role": "user", "content": content}] if templated else content
                yield _Job(number, heat, messages, asks_turn=self._asked is None)  # type: ignore[arg-type]

    def _temperature(self, number: int, again: bool) -> float:
        """By share; a prompt that is asked again is not asked greedily."""
        pairs = [(heat, share) for heat, share in self._settings.temperatures if heat or not again]
        place = self._bits(number, "temperature") / 2**63 * sum(share for _, share in pairs)
        for heat, share in pairs:
            place -= share
            if place < 0:
                return heat
        return pairs[-1][0]

    def _next(self) -> Ask | None:
        """The next request; jobs that are under way go first."""
        while True:
            job = self._ready.popleft() if self._ready else next(self._new, None)
            if job is None:
                return None
            try:
                ask = self._ask_turn(job) if job.asks_turn else self._ask_reply(job)
                if len(job.ids) >= self._llm.resolved.max_context:
                    raise RequestError("the prompt is longer than the context")
                return ask
            except RequestError as error:
                self._give_up(job, "prompts refused", str(error))

    def _ask_turn(self, job: _Job) -> Ask:
        assert isinstance(job.content, list)
        job.ids, ends = opening(self._llm, job.content)
        seed = self._bits(job.number, f"turn {len(job.content)}")
        params = SamplingParams(temperature=1.0, max_tokens=TURN_TOKENS, stop_token_ids=ends, seed=seed)
        return job, job.ids, params

    def _ask_reply(self, job: _Job) -> Ask:
        job.ids = self._llm.encode(job.content, raw=isinstance(job.content, str))
        seed = self._bits(job.number, f"reply {len(job.kept)}")
        params = SamplingParams(temperature=job.temperature, max_tokens=self._settings.max_tokens, seed=seed)
        return job, job.ids, params

    def _take(self, job: _Job, result: Result) -> Sequence[Conversation]:
        """Take a result in -> the job's conversations once it is over."""
        if result.error is not None:
            return self._give_up(job, "replies failed", result.error)
        if job.asks_turn:
            return self._take_turn(job, result)
        digest = _digest(job.content)
        job.kept.append(Conversation(job.number, job.ids, result.token_ids, job.temperature, digest))
        goes_on = isinstance(job.content, list) and self._llm.tokenizer.chat_template and len(job.kept) == 1
        if not goes_on or result.finish_reason != FinishReason.STOP or not result.text.strip():
            return job.kept
        if self._bits(job.number, "follow-up") / 2**63 >= self._settings.follow_up:
            return job.kept
        assert isinstance(job.content, list)
        job.content = [*job.content, {"role": "assistant", "content": result.text}]
        job.asks_turn = True
        self._ready.append(job)
        return ()

    def _take_turn(self, job: _Job, result: Result) -> Sequence[Conversation]:
        text = result.text.strip()
        if result.finish_reason != FinishReason.STOP or not text:
            return self._give_up(job, "turns without an end or words")
        assert isinstance(job.content, list)
        job.content = [*job.content, {"role": "user", "content": text}]
        digest = _digest(job.content)
        if digest in self._seen_prompts:
            return self._give_up(job, "turns said before")
        self._seen_prompts.add(digest)
        job.asks_turn = False
        self._ready.append(job)
        return ()

    def _give_up(self, job: _Job, reason: str, problem: str | None = None) -> Sequence[Conversation]:
        """Leave a job, or its follow-up, out and count it; one bad prompt costs nothing but itself."""
        self._shard.leave_out(reason)
        self.problem = self.problem or problem or reason
        return job.kept

    def _bits(self, number: int, use: str) -> int:
        """63 random bits of a job, for one use."""
        return _hash(f"{self._settings.seed}/{number}/{use}")


def opening(llm: LLM, messages: Messages) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a conversation up to where the user's next words would begin, and the tokens that end such words.

    Raises:
        ConfigError: if the model has no chat template, or one in which a user's words cannot be found again.
    """
    mark = "outrider-user-words"
    if not llm.tokenizer.chat_template:
        raise ConfigError("this model has no chat template to make up a user's words from: give prompts")
    try:
        text = llm.tokenizer.apply_chat_template([*messages, {"role": "user", "content": mark}], tokenize=False)
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        raise ConfigError(f"the chat template refused a user's turn ({error}): give prompts") from error
    before, found, after = text.partition(mark)
    if not found or not before:
        raise ConfigError("the chat template hides where a user's words begin: give prompts")
    encode = llm.tokenizer.encode
    following = encode(after, add_special_tokens=False)[:1]
    special = set(llm.tokenizer.all_special_ids)
    return tuple(encode(before, add_special_tokens=False)), tuple(token for token in following if token in special)


def _describe(llm: LLM, asked: list[str | Messages] | None, settings: ReplySettings) -> dict[str, Any]:
    """What every conversation of a folder depends on, as plain data."""
    kept = {
        key: value for key, value in asdict(settings).items() if key not in ("num_tokens", "seconds", "shard_tokens")
    }
    prompts = None if asked is None else f"{_hash(json.dumps(asked)):016x}"
    resolved = llm.resolved
    described = {"model": resolved.model, "dtype": resolved.dtype, "prompts": prompts, **kept}
    plain: dict[str, Any] = json.loads(json.dumps(described))  # tuples as lists, as they are read back
    return plain


def _refuse_other_settings(folder: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in wanted:
        if there.get(key) != wanted[key]:
            raise ConfigError(
                f"{folder} holds replies made with {key}={there.get(key)!r} and {wanted[key]!r} is asked for: "
                "choose another folder, or the same settings"
            )


def _digest(content: str | Messages) -> int:
    """63 bits of a prompt, whatever its case and spaces."""
    text = content if isinstance(content, str) else "\0".join(message["content"] for message in content)
    return _hash(" ".join(text.lower().split()))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 1
