"""What may be asked over HTTP: OpenAI's fields and ours, each honoured exactly; any other is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from outrider.errors import RequestError
from outrider.request import LogprobsMode


def _told(**bounds: float) -> Any:
    """Bounds that `/openapi.json` tells; whoever keeps them has a better sentence than pydantic's."""
    return Field(json_schema_extra=dict(bounds))


def _one_wrong(value: Any) -> Any:
    """Of numbers by name the first that is none, if there is one: nobody reads a list of a hundred thousand."""
    if isinstance(value, dict):
        wrong = (name for name, one in value.items() if type(one) not in (int, float))
        return {name: value[name] for name in [next(wrong, None)] if name is not None} or value
    return value


FAST = Field(fail_fast=True)
"""Of a list: the first wrong item is told of, and the others are not looked at."""
Count = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[Annotated[int, _told(minimum=0)]], FAST]
Numbers = Annotated[dict[str, float], BeforeValidator(_one_wrong)]
Prompt = Annotated[str, _told(minLength=1)]
PromptIds = Annotated[list[Annotated[int, _told(minimum=0)]], Field(fail_fast=True, json_schema_extra={"minItems": 1})]
MANY = Field(fail_fast=True, json_schema_extra={"minItems": 1})
BadIds = Annotated[TokenIds, Field(max_length=1000)]
StopText = Annotated[str, Field(max_length=1000, json_schema_extra={"minLength": 1})]
"""Stop strings and bad words are looked at for every token, so one request with many would slow down all others."""


class Form(BaseModel):
    """A body, or a part of one: no unknown field, and no value that would have to be guessed at."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: Any) -> Any:
        """Leave one unknown field to be refused, so that a body full of them costs no more than that."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        extra = [name for name in given if name not in known]
        return {name: value for name, value in given.items() if name in known or name == extra[0]} if extra else given


class StreamOptions(Form):
    """`include_usage`: a last chunk tells the usage of the whole stream."""

    include_usage: bool = False


class Speculation(Form):
    """How this request is drafted; no text depends on it.

    `drafter` and `acceptance` belong to the engine, so another one than it has is refused; "none" draws plainly.
    `trace` tells every cycle's nodes with p, q, verdict and time.
    """

    drafter: str | None = None
    depth: Count | None = None
    width: Annotated[int, Field(ge=1)] | None = None
    enabled: bool = True
    acceptance: Literal["match", "rejection"] | None = None
    trace: bool = False


class JsonSchema(Form):
    """OpenAI's frame of a schema; its text is JSON of the schema whether `strict` is said or not."""

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Form):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and only with it")
        return self


class GrammarSpec(Form):
    """A regular expression, a grammar in Lark, or a choice of texts: exactly one of them."""

    regex: str | None = None
    lark: str | None = None
    choice: Annotated[list[str], FAST] | None = None

    @model_validator(mode="after")
    def _one(self) -> GrammarSpec:
        if len(self.model_fields_set) != 1:
            raise ValueError("give exactly one of regex, lark and choice")
        return self


class Ask(Form):
    """What a completion and a chat have in common; null means the default."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, _told(minimum=0)] | None = None
    top_p: Annotated[float, _told(exclusiveMinimum=0, maximum=1)] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Numbers | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64, fail_fast=True)] | None = None
    seed: Annotated[int, _told(minimum=0, maximum=2**64 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: Annotated[int, _told(minimum=0)] | None = None
    min_p: Annotated[float, _told(minimum=0, maximum=1)] | None = None
    repetition_penalty: Annotated[float, _told(exclusiveMinimum=0)] | None = None
    min_tokens: Annotated[int, _told(minimum=0)] | None = None
    bad_words: Annotated[list[StopText | BadIds], Field(max_length=1000, fail_fast=True)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1000)] | None = None
    ignore_eos: bool | None = None
    logprobs_mode: Literal["raw", "warped"] | None = None
    response_format: ResponseFormat | None = None
    grammar: GrammarSpec | None = None
    speculation: Speculation | None = None
    stream_smoothing: bool | None = None
    timeout: Annotated[float, Field(ge=1)] | None = None
    priority: Annotated[int, Field(ge=0, le=100)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Ask:
        if not self.stream and (self.stream_options or self.stream_smoothing):
            raise ValueError("stream_options and stream_smoothing go with stream: true, and only with it")
        if self.grammar and self.response_format and self.response_format.type != "text":
            raise ValueError("grammar and response_format both shape the text: give one of them")
        return self

    def sampling(self) -> dict[str, Any]:
        """Keywords of `SamplingParams` for what is given here; `logprobs` and the grammar come later."""
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        given.setdefault("temperature", 1.0)  # OpenAI's default; offline it is 0
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.bad_words is not None:
            given["bad_words"] = tuple(w if isinstance(w, str) else tuple(w) for w in self.bad_words)
        if self.logit_bias is not None:
            given["logit_bias"] = {_token(name): bias for name, bias in self.logit_bias.items()}
        if self.logprobs_mode is not None:
            given["logprobs_mode"] = LogprobsMode(self.logprobs_mode)
        return given


class CompletionAsk(Ask):
    """The body of `/v1/completions`; `prompt` is one or several texts, or their token ids."""

    prompt: Prompt | Annotated[list[Prompt], MANY] | PromptIds | Annotated[list[PromptIds], MANY]
    max_tokens: Count | None = None
    logprobs: Count | None = None
    echo: bool | None = None

    def prompts(self) -> list[str] | list[TokenIds]:
        """Each prompt by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TextPart(Form):
    """A piece of a message; pictures and sound are not understood here."""

    type: Literal["text"]
    text: str


class FunctionCall(Form):
    """A call that the model made earlier; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(Form):
    """One call of an earlier turn of the assistant's."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Form):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FAST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FAST] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message has content, or tool_calls")
        return self


class Function(Form):
    """What may be called: `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Form):
    """A tool of the model's."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Form):
    """The name of a function."""

    name: str


class ToolChoice(Form):
    """This function and no other."""

    type: Literal["function"]
    function: NamedFunction


class ChatAsk(Ask):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Annotated[list[Tool], FAST] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatAsk:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true, and only with it")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens say different things: give one of them")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice goes with tools")
        return self


class TokenizeAsk(Form):
    """The body of `/tokenize`: a text as it is, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeAsk:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class DetokenizeAsk(Form):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: PromptIds


_SAME = (
    "n",
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)
"""Fields that mean here what they mean in `SamplingParams`."""


def _token(name: str) -> int:
    if not name.isdecimal() or not name.isascii() or len(name) > 20:
        raise RequestError(f"logit_bias names {name!r}, which is no token id: give ids of the model's vocabulary")
    return int(name)
