"""From a body to prompts and params: what cannot be honoured here is refused by the field's name."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import RequestError
from outrider.llm import LLM
from outrider.registry import DRAFTERS, unknown
from outrider.request import SamplingParams
from outrider.sampling.grammar import GrammarMaker
from outrider.server.errors import ApiError
from outrider.server.protocol import Ask, ChatAsk, CompletionAsk, Message, Speculation
from outrider.server.settings import ServeConfig
from outrider.server.tools import ToolFormat

SEED_BITS = 53
"""Of a seed that is drawn here: JavaScript's numbers hold no more."""

DENSEST = 32
"""Characters a token, of a whole prompt; hardly any text but blanks comes near it. A longer one is not tokenized."""
DEFAULT_TOKENS = 16
"""Of a completion, as OpenAI's; a chat goes on to the end of the context."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the engine is asked for one HTTP request.

    Attributes:
        prompts: token ids of each; texts: what an echo shows of each. params: of all of them, with a seed.
        is_silent: nothing is to be generated (`max_tokens` 0); the one token that is drawn all the same is not told.
        has_tools: the text may hold calls.
    """

    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    params: SamplingParams
    seed: int
    is_silent: bool = False
    has_tools: bool = False


class Preparer:
    """Turns bodies into `Prepared`; it tokenizes and compiles grammars, so it runs in a thread of its own."""

    def __init__(self, llm: LLM, config: ServeConfig, served_name: str) -> None:
        self.llm = llm
        self.config = config
        self.served_name = served_name
        self._maker: GrammarMaker | None = None

    @property
    def grammars(self) -> GrammarMaker:
        """Made when first needed: reading a vocabulary takes a moment."""
        if self._maker is None:
            target = self.llm.engine.target
            self._maker = GrammarMaker(self.llm.tokenizer, target.vocab_size, sorted(target.eos_ids))
        return self._maker

    def completion(self, ask: CompletionAsk) -> Prepared:
        """What `/v1/completions` asks for.

        Raises:
            RequestError, ApiError: it cannot be honoured.
        """
        if ask.max_tokens == 0 and not ask.echo:
            raise ApiError(
                400, "max_tokens=0 asks for nothing: give at least 1, or echo the prompt", param="max_tokens"
            )
        given = ask.prompts()
        if not given:
            raise ApiError(400, "the prompt is empty: give at least one", param="prompt")
        self._check_samples(len(given), ask.n or 1)  # before so many are tokenized
        for prompt in given:
            self._check_length(len(prompt), isinstance(prompt, str))
        prompts = [self.llm.encode(prompt, raw=True) for prompt in given]
        texts = tuple(prompt if isinstance(prompt, str) else self.llm.prompts.decode(prompt) for prompt in given)
        logprobs = {} if ask.logprobs is None else {"logprobs": self._top("logprobs", ask.logprobs)}
        if ask.echo and ask.logprobs is not None:
            logprobs["prompt_logprobs"] = ask.logprobs
        wanted = DEFAULT_TOKENS if ask.max_tokens is None else max(1, ask.max_tokens)
        prepared = self._prepared(ask, prompts, wanted, logprobs, self._grammar(ask))
        return Prepared(prepared.prompts, texts, prepared.params, prepared.seed, is_silent=ask.max_tokens == 0)

    def chat(self, ask: ChatAsk) -> Prepared:
        """What `/v1/chat/completions` asks for.

        Raises:
            RequestError, ApiError: it cannot be honoured.
        """
        tools = [tool.model_dump(exclude_none=True) for tool in ask.tools or ()]
        form = None
        self._check_samples(1, ask.n or 1)
        automaton = self._grammar(ask)
        if tools and ask.tool_choice != "none":
            form = ToolFormat(str(self.llm.tokenizer.chat_template))
            forced = form.grammar(ask, self.llm.tokenizer.get_vocab())
            if forced is not None and automaton is not None:
                raise ApiError(400, "tool_choice and response_format both shape the text: give one of them")
            automaton = automaton if forced is None else self.grammars.lark(forced)
        prompt = self.messages(ask.messages, tools if form else ())
        logprobs = {"logprobs": self._top("top_logprobs", ask.top_logprobs or 0)} if ask.logprobs else {}
        wanted = ask.max_tokens if ask.max_completion_tokens is None else ask.max_completion_tokens
        if wanted == 0:
            raise ApiError(
                400, "max_completion_tokens=0 asks for nothing: give at least 1", param="max_completion_tokens"
            )
        prepared = self._prepared(ask, [prompt], wanted, logprobs, automaton)
        return Prepared(prepared.prompts, ("",), prepared.params, prepared.seed, has_tools=form is not None)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not the one here."""
        if name is not None and name != self.served_name:
            raise ApiError(
                404,
                f"model {name!r} is not served here: ask for {self.served_name!r}",
                param="model",
                code="model_not_found",
            )

    def messages(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[int, ...]:
        """Token ids of a conversation, as a chat would have them.

        Raises:
            RequestError, ApiError: it is none, or too long.
        """
        turns = [self._message(message) for message in messages]
        self._check_length(sum(len(turn["content"]) for turn in turns))
        return self.llm.encode(turns, tools=tools)

    def text(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text as it is.

        Raises:
            RequestError, ApiError: it is none, or too long.
        """
        self._check_length(len(text))
        return self.llm.prompts.tokenize(text, add_special_tokens)

    def back(self, tokens: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            RequestError, ApiError: they are none of the model's, or too many.
        """
        self._check_length(len(tokens), is_text=False)
        text: str = self.llm.tokenizer.decode(self.llm.encode(tokens))
        return text

    def _prepared(
        self, ask: Ask, prompts: list[tuple[int, ...]], max_tokens: int | None, told: dict[str, int], automaton: Any
    ) -> Prepared:
        self.check_model(ask.model)
        given = ask.sampling()
        if "bad_words" in given:  # here, since the engine's thread has better to do than to tokenize
            given["bad_words"] = self.llm.prompts.bad_words(given["bad_words"])
        seed = given.setdefault("seed", secrets.randbits(SEED_BITS))
        given["max_tokens"] = self._limit(prompts, max_tokens)
        params = SamplingParams.of(**given, **told, **self._speculation(ask.speculation), automaton=automaton)
        return Prepared(tuple(prompts), (), params, seed)

    def _check_samples(self, num_prompts: int, n: int) -> None:
        if num_prompts * n > self.config.max_samples:
            raise ApiError(
                400,
                f"{num_prompts} prompts times n={n} are over {self.config.max_samples} samples: ask for less",
                param="n",
            )

    def _check_length(self, size: int, is_text: bool = True) -> None:
        """Refuse, before any work is done on it, a prompt of more characters or ids than any context's worth."""
        most = self.llm.resolved.max_context * (DENSEST if is_text else 1)
        if size > most:
            raise ApiError(
                400,
                f"the prompt has {size} {'characters' if is_text else 'tokens'}, and {most} are read for a context of "
                f"{self.llm.resolved.max_context} tokens: shorten it",
                code="context_length_exceeded",
            )

    def _limit(self, prompts: list[tuple[int, ...]], wanted: int | None) -> int | None:
        """Completion tokens, or None for as many as the context holds."""
        longest, context = max(map(len, prompts)), self.llm.resolved.max_context
        most_in, most_out = self.config.max_prompt_tokens, self.config.max_output_tokens
        if most_in is not None and longest > most_in:
            raise ApiError(400, f"the prompt has {longest} tokens and {most_in} are allowed here: shorten it")
        if wanted is None:
            return most_out
        if most_out is not None and wanted > most_out:
            raise ApiError(
                400, f"max_tokens={wanted} is more than the {most_out} that are allowed here", param="max_tokens"
            )
        if longest + wanted > context:
            raise ApiError(
                400,
                f"{longest} tokens of the prompt and max_tokens={wanted} are more than the context's {context}: "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return wanted

    def _top(self, name: str, count: int) -> int:
        if count > self.config.max_logprobs:
            raise ApiError(
                400, f"{name}={count} is more than the {self.config.max_logprobs} that are allowed here", param=name
            )
        return count

    def _speculation(self, wish: Speculation | None) -> dict[str, Any]:
        """Keywords of `SamplingParams`; what belongs to the engine must be as the engine has it."""
        if wish is None:
            return {}
        resolved = self.llm.resolved
        if wish.drafter not in (None, "auto", "none", resolved.drafter):
            problem = unknown("drafter", wish.drafter[:100].split("+"), list(DRAFTERS))
            raise ApiError(
                400,
                f"speculation.drafter={wish.drafter!r}: "
                + (problem or f"this server drafts with {resolved.drafter!r}; leave it out, or start a server with it"),
                param="speculation.drafter",
            )
        if wish.acceptance not in (None, resolved.acceptance):
            raise ApiError(
                400,
                f"speculation.acceptance={wish.acceptance!r}: this server verifies by {resolved.acceptance!r}; "
                "leave it out, or start a server with it",
                param="speculation.acceptance",
            )
        plain = not wish.enabled or wish.drafter == "none"
        return {"speculation": not plain, "depth": wish.depth, "width": wish.width, "trace": wish.trace}

    def _grammar(self, ask: Ask) -> Any:
        """The automaton of what shapes the text; None where nothing does."""
        wish, spec = ask.response_format, ask.grammar
        if spec is not None:
            if spec.regex is not None:
                return self.grammars.regex(spec.regex)
            if spec.lark is not None:
                return self.grammars.lark(spec.lark)
            return self.grammars.choice(spec.choice or ())
        if wish is None or wish.type == "text":
            return None
        if wish.json_schema is None:
            return self.grammars.json_object()
        return self.grammars.json_schema(wish.json_schema.schema_)

    def _message(self, message: Message) -> dict[str, Any]:
        """A message as chat templates read them."""
        content = message.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        template = str(self.llm.tokenizer.chat_template)
        for name in ("name", "tool_call_id", "tool_calls"):
            value = getattr(message, name)
            if value is None:
                continue
            if name not in template and name != "tool_call_id":
                raise RequestError(f"the chat template of this model does not read a message's {name}: leave it out")
            made[name] = value
        if message.tool_calls:
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _called(call.function.name, call.function.arguments)}
                for call in message.tool_calls
            ]
        return made


def _called(name: str, arguments: str) -> dict[str, Any]:
    """A call as templates read it: its arguments are values, not text."""
    try:
        return {"name": name, "arguments": json.loads(arguments)}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the arguments of an earlier call of {name!r} are no JSON ({error}): mend them") from error
