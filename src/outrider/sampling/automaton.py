"""A finite automaton over token ids: the smallest grammar that can stand behind `SamplingParams.automaton`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from outrider.errors import RequestError


@dataclass(frozen=True, slots=True)
class TokenAutomaton:
    """States with the tokens that lead on from them; a state mapped to None allows every token and never leaves.

    Attributes:
        initial: the state before the first completion token.
        transitions: state -> token id -> next state. To end a text, let an end token lead to a state that goes on.

    Raises:
        RequestError: a state is missing, allows no token, or is None (which means a dead path).
    """

    initial: Hashable
    transitions: Mapping[Hashable, Mapping[int, Hashable] | None]

    def __post_init__(self) -> None:
        reached = {self.initial}.union(*(steps.values() for steps in self.transitions.values() if steps is not None))
        for state in reached | set(self.transitions):
            if state is None:
                raise RequestError("None cannot be an automaton's state: it marks a path that is forbidden")
            if state not in self.transitions:
                raise RequestError(f"the automaton reaches state {state!r}, which has no transitions: add them")
            steps = self.transitions[state]
            if steps is not None and not steps:
                raise RequestError(f"the automaton allows no token in state {state!r}: let an end token lead on")

    def start(self) -> Hashable:
        return self.initial

    def advance(self, state: Hashable, token: int) -> Hashable:
        """The state after `token`, None if `state` forbids it."""
        steps = self.transitions[state]
        return state if steps is None else steps.get(token)

    def allowed(self, state: Hashable) -> tuple[int, ...] | None:
        steps = self.transitions[state]
        return None if steps is None else tuple(sorted(steps))
