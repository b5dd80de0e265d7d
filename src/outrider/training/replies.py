"""The target's own replies as a corpus to train on: to given prompts, or to user turns that it makes up itself.

A drafter learns what its target says, so its data is what the target said: at several temperatures, since it is asked
at several. Without prompts the target is given its chat template up to where a user's words would begin and writes them
itself (Magpie, arXiv:2406.08464).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from outrider.errors import ConfigError, RequestError
from outrider.llm import LLM, Ask
from outrider.request import FinishReason, SamplingParams
from outrider.result import Result
from outrider.training.reply_settings import ReplySettings, describe, refuse_other_settings
from outrider.training.shards import Conversation, Shard, read_written, summarise, write_shard
from outrider.training.turns import Messages, bits_of, digest, opening

TURN_TOKENS = 256
"""Most tokens of a user turn; one that has not ended by then is left out."""
PATIENCE = 1000
"""Prompts that may be left out before the first is kept: then nothing will come of it."""
PROGRESS_SECONDS = 1.0


class PromptLike(Protocol):
    """What is asked: a text, or the messages of a conversation."""

    @property
    def content(self) -> str | Messages: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank has got in this run; note: for people."""

    conversations: int
    reply_tokens: int
    seconds: float
    note: str = ""


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
    prompts: Iterable[PromptLike] | None,
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
        What `corpus.json` says of all shards that are there. A rank that has nothing to add notes so.

    Raises:
        ConfigError: no prompts, a folder of other settings, a full disk (what was written stays), or nothing to keep
            where there is no other rank.
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
    reason = run.problem or "the time was too short"
    if not found["shards"] and world == 1:
        raise ConfigError(f"no reply could be kept ({reason}): check the prompts")
    if run.has_added_nothing and progress is not None:
        progress(Progress(0, 0, 0.0, f"rank {rank} of {world} has no reply to add ({reason})"))
    return found


class _Run:
    """One rank's run: hands jobs to the engine, takes results, writes shards."""

    def __init__(
        self, llm: LLM, asked: list[str | Messages] | None, folder: Path, settings: ReplySettings, rank: int, world: int
    ) -> None:
        self.problem: str | None = None
        self._llm, self._asked, self._folder, self._settings = llm, asked, folder, settings
        self._rank, self._world = rank, world
        self._described = describe(llm, asked, settings)
        self._shard = Shard()
        self._ready: deque[_Job] = deque()
        self._done: set[int] = set()
        self._seen_prompts: set[int] = set()
        self._number = rank
        self._conversations = self._tokens = self._accepted = 0  # of this run
        kept = 0
        for written in read_written(folder):
            refuse_other_settings(folder, written.settings, self._described)
            self._done.update(written.jobs)
            self._seen_prompts.update(written.prompt_digests)
            if written.number % world == rank:
                self._number = written.number + world
                kept += written.counts["reply_tokens"]
        total = settings.num_tokens
        self._missing = None if total is None else -(-total // world) - kept
        self.has_added_nothing = not kept  # by now, in any run
        # Once every prompt was asked, a greedy reply would only come again.
        self._asks_again = total is not None and any(heat for heat, _ in settings.temperatures)
        if asked is not None and rank >= len(asked) and not self._asks_again:
            self.problem = f"the prompts, {len(asked)}, are fewer than the processes"
        self._new = self._jobs()

    def go(self, progress: Callable[[Progress], None] | None) -> None:
        """Generate until there is enough; what is finished is written even where an error ends the run."""
        started = told = time.monotonic()
        with closing(self._llm.generate_from(self._next)) as results:
            try:
                while not self._has_enough(time.monotonic() - started):
                    found = next(results, None)
                    if found is None:
                        break
                    self._take(*found)
                    now = time.monotonic()
                    if progress is not None and now - told >= PROGRESS_SECONDS:
                        told = now
                        progress(Progress(self._conversations, self._tokens, now - started))
                    if self._shard.num_tokens >= self._settings.shard_tokens:
                        self._write()
            finally:
                self._write()
        if progress is not None:
            progress(Progress(self._conversations, self._tokens, time.monotonic() - started))

    def _has_enough(self, seconds: float) -> bool:
        return (
            (self._missing is not None and self._tokens >= self._missing)
            or (self._settings.seconds is not None and seconds > self._settings.seconds)
            or (not self._conversations and sum(self._shard.left_out.values()) >= PATIENCE)
        )

    def _keep(self, job: _Job) -> None:
        """The job is over: its conversations go into the shard, all at once, as a resumed run expects."""
        for conversation in job.kept:
            self._shard.add(conversation)
            self.has_added_nothing = False
            self._conversations += 1
            self._tokens += len(conversation.reply)

    def _write(self) -> None:
        if self._shard.conversations:
            shard, self._shard = self._shard, Shard()
            write_shard(self._folder, self._number, shard, self._described)
            self._number += self._world

    def _jobs(self) -> Iterator[_Job]:
        """This rank's jobs that no shard holds yet."""
        offered = 0
        for number in count(self._rank, self._world):
            epoch = 0 if self._asked is None else number // len(self._asked)
            if epoch and not self._asks_again:
                return
            if number in self._done:
                continue
            if self._asked is not None and offered >= len(self._asked) and not self._accepted:
                return  # it went round all of its prompts, and none could be asked
            offered += 1
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
                self._accepted += 1
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

    def _take(self, job: _Job, result: Result) -> None:
        if result.error is not None:
            self._give_up(job, "replies failed", result.error)
        elif job.asks_turn:
            self._take_turn(job, result)
        else:
            self._take_reply(job, result)

    def _take_reply(self, job: _Job, result: Result) -> None:
        prompt = digest(job.content)
        job.kept.append(Conversation(job.number, job.ids, result.token_ids, job.temperature, prompt))
        goes_on = (
            isinstance(job.content, list)
            and len(job.kept) == 1
            and result.finish_reason == FinishReason.STOP
            and result.text.strip()
            and self._bits(job.number, "follow-up") / 2**63 < self._settings.follow_up
        )
        if not goes_on:
            self._keep(job)
            return
        self._say(job, "assistant", result.text)
        job.asks_turn = True
        self._ready.append(job)

    def _take_turn(self, job: _Job, result: Result) -> None:
        text = result.text.strip()
        if result.finish_reason != FinishReason.STOP or not text:
            self._give_up(job, "turns without an end or words")
            return
        self._say(job, "user", text)
        prompt = digest(job.content)
        if prompt in self._seen_prompts:
            self._give_up(job, "turns said before")
            return
        self._seen_prompts.add(prompt)
        job.asks_turn = False
        self._ready.append(job)

    def _say(self, job: _Job, role: str, text: str) -> None:
        assert isinstance(job.content, list)
        job.content = [*job.content, {"role": role, "content": text}]

    def _give_up(self, job: _Job, reason: str, problem: str | None = None) -> None:
        """Leave a job, or its follow-up, out and count it; one bad prompt costs nothing but itself."""
        self._shard.leave_out(reason)
        self.problem = self.problem or problem or reason
        self._keep(job)

    def _bits(self, number: int, use: str) -> int:
        """63 random bits of a job, for one use."""
        return bits_of(f"{self._settings.seed}/{number}/{use}")
