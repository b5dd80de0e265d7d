"""Calls of tools in a model's text: how they are written, found while the text still streams, and forced."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.server.errors import ApiError
from outrider.server.protocol import ChatAsk, Function, ToolChoice

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""What most open-weight models write around the JSON of a call (the form of Hermes, and of Qwen)."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was found: a function's name and its arguments as JSON."""

    name: str
    arguments: str

    def to_json(self, index: int | None = None) -> dict[str, Any]:
        """In OpenAI's shape; a stream's pieces carry their index."""
        call = {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


class ToolFormat:
    """How the model of a chat template calls.

    Raises:
        ApiError: the template shows no form that is known here.
    """

    def __init__(self, template: str) -> None:
        if OPEN not in template:
            raise ApiError(
                400,
                f"the chat template of this model shows no calls between {OPEN} and {CLOSE}, which is read here: "
                "leave tools out, or describe them in a message",
                param="tools",
            )

    def grammar(self, ask: ChatAsk, vocabulary: Mapping[str, int]) -> str | None:
        """A grammar in Lark for a call that must come; None where the model is free.

        Raises:
            ApiError: what is asked for can be promised only of a call that must come.
        """
        functions = [tool.function for tool in ask.tools or ()]
        if isinstance(ask.tool_choice, ToolChoice):
            name = ask.tool_choice.function.name
            functions = [function for function in functions if function.name == name]
            if not functions:
                raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
        elif ask.tool_choice != "required":
            if ask.parallel_tool_calls is False or any(function.strict for function in functions):
                raise ApiError(
                    400,
                    "parallel_tool_calls: false and strict functions are kept only with tool_choice 'required' or a "
                    "named function: give one, or leave them out",
                    param="tool_choice",
                )
            return None
        several = ask.tool_choice == "required" and ask.parallel_tool_calls is not False
        calls = 'call ("\\n" call)*' if several else "call"
        schema = {"anyOf": [_schema(function) for function in functions]}
        first, last = (_literal(mark, vocabulary) for mark in (OPEN, CLOSE))
        return f'start: {calls}\ncall: {first} "\\n" json "\\n" {last}\njson: %json {json.dumps(schema)}\n'


class ToolStream:
    """A text as it comes, parted into what is said and what is called."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """More of the text: what of it is certainly said, and the calls that it completes."""
        self._held += text
        said, calls = "", list[Call]()
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                said += self._held[:start]
                self._held = self._held[start:]
                return said, calls
            call = _parse(self._held[start + len(OPEN) : end])
            after = end + len(CLOSE)
            said += self._held[: start if call else after]  # what is no call was only said
            calls += [call] if call else []
            self._held = self._held[after:]
        keep = next((size for size in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:size])), 0)
        said += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return said, calls

    def finish(self) -> str:
        """Nothing follows: what was held back was said."""
        held, self._held = self._held, ""
        return held


def _parse(text: str) -> Call | None:
    try:
        call = json.loads(text)
        return Call(str(call["name"]), json.dumps(call.get("arguments", {}), ensure_ascii=False))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _schema(function: Function) -> dict[str, Any]:
    """JSON of one call."""
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": function.parameters or {"type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _literal(mark: str, vocabulary: Mapping[str, int]) -> str:
    """A mark in Lark: its token where it is one, else its text."""
    return f"<[{vocabulary[mark]}]>" if mark in vocabulary else json.dumps(mark)
