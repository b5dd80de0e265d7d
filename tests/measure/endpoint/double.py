"""A server over a tiny law with a speculative sampler of its own, into which one fault can be planted."""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI, Request, Response

from outrider.measure.endpoint.client import Endpoint

FAULTS = (
    "wrong residual",
    "shared noise",
    "temperature ignored",
    "min_p ignored",
    "top_p ignored",
    "penalty by cycle",
    "penalty ignored in guesses",
    "end overrun",
    "rollback off by one",
    "usage miscounted",
    "stop string leaked",
    "stream loses a chunk",
    "choices share noise",
    "bias at the first token only",
    "limit overrun",
    "log-probabilities of another row",
    "neighbours mixed up",
    "another model",
)
VOCAB = 110
END = 0
DEPTH = 4
LIKELY = 12
WORDS = ["<end>", *(f" {chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(VOCAB - 1))]
IDS = {word: token for token, word in enumerate(WORDS)}


def tokenize(text: str) -> list[int]:
    """Words of the vocabulary; any other character is a token by itself, which is only ever read."""
    found, place = [], 0
    while place < len(text):
        word = text[place : place + 3]
        found.append(IDS.get(word, 1000 + ord(text[place])))
        place += 3 if word in IDS else 1
    return found


def name(token: int) -> str:
    return WORDS[token] if token < VOCAB else chr(token - 1000)


@functools.cache
def logits(context: tuple[int, ...], guess: bool = False) -> np.ndarray:
    """(V,) of the target, or of a drafter that is right more often than not."""
    rng = np.random.default_rng([7, *context])
    row = np.full(VOCAB, -9.0) + rng.normal(size=VOCAB)
    likely = rng.choice(np.arange(1, VOCAB), LIKELY, replace=False)
    row[likely] = rng.normal(size=LIKELY) * 1.5
    row[END] = 0.0
    row[context[-1] % VOCAB] = 1.0  # words come again, so that penalties matter
    if guess:
        row = row + np.random.default_rng([8, *context]).normal(size=VOCAB)
    return row


@functools.cache
def told(context: tuple[int, ...], num_top: int) -> tuple[dict[str, float], np.ndarray]:
    row = logits(context)
    row = row - math.log(np.exp(row).sum())
    return {WORDS[i]: float(row[i]) for i in np.argsort(-row, kind="stable")[:num_top]}, row


def law(row: np.ndarray, body: dict[str, Any], counts: Counter[int], prompt: Sequence[int]) -> np.ndarray:
    """(V,) chances, by the usual chain."""
    row = row.copy()
    for token, bias in (body.get("logit_bias") or {}).items():
        row[int(token)] += bias
    repetition = body.get("repetition_penalty", 1)
    for token in {*counts, *prompt} if repetition != 1 else ():
        if token < VOCAB:
            row[token] = row[token] * repetition if row[token] < 0 else row[token] / repetition
    for token, count in counts.items():
        row[token] -= count * body.get("frequency_penalty", 0) + body.get("presence_penalty", 0)
    if body.get("ignore_eos") == "never drawn":
        row[END] = -math.inf
    temperature = body.get("temperature", 1)
    if temperature == 0:
        return np.eye(VOCAB)[int(row.argmax())]
    chances = np.exp((row - row.max()) / temperature)
    order = np.argsort(-chances, kind="stable")
    kept = len(order)
    if body.get("top_k"):
        kept = body["top_k"]
    if body.get("top_p", 1) < 1:
        mass = chances[order].cumsum() / chances.sum()
        kept = min(kept, 1 + int((mass < body["top_p"]).sum()))
    if body.get("min_p"):
        kept = min(kept, int((chances[order] >= body["min_p"]).sum()))
    chances[order[kept:]] = 0
    return chances / chances.sum()


def draw(chances: np.ndarray, uniform: float) -> int:
    """By the inverse of the distribution function."""
    return min(int(np.searchsorted(chances.cumsum(), uniform, side="right")), int(chances.nonzero()[0][-1]))


def seen_as(fault: str | None, tokens: Sequence[int]) -> tuple[int, ...]:
    """What the law depends on; there is none before the first token."""
    return (*((9,) if fault == "another model" and tokens else ()), *tokens[-2:])


@dataclass
class Text:
    """One choice as it is made."""

    prompt: list[int]
    body: dict[str, Any]
    rng: random.Random
    fault: str | None
    output: list[int] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    stale: int | None = None
    finish: str | None = None
    cycles: int = 0

    def context(self, guesses: Sequence[int] = ()) -> tuple[int, ...]:
        seen = [*self.prompt, *self.output, *guesses]
        if self.stale is not None:
            seen[len(self.prompt) + len(self.output) - 2] = self.stale
        return seen_as(self.fault, seen)

    def chances(self, guesses: Sequence[int], guess: bool = False) -> np.ndarray:
        body, said = self.body, [*self.output, *guesses]
        inner = bool(self.output)
        if self.fault == "temperature ignored" and inner and body.get("temperature", 1) > 0:
            body = {**body, "temperature": 1}
        if self.fault in ("min_p ignored", "top_p ignored") and inner:
            body = {key: value for key, value in body.items() if key != self.fault.split()[0]}
        if self.fault == "bias at the first token only" and inner:
            body = {key: value for key, value in body.items() if key != "logit_bias"}
        if self.fault == "penalty by cycle":
            said = self.counted
        if self.fault == "penalty ignored in guesses":
            said = self.output
        return law(logits(self.context(guesses), guess), body, Counter(said), self.prompt)

    def cycle(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Guess, verify: the tokens that were decided, and the context of each one's law."""
        if not self.output:
            return [draw(self.chances([]), self.rng.random())], [self.context()]
        guesses: list[int] = []
        laws, uniforms = [], []
        for _ in range(DEPTH):
            laws.append(self.chances(guesses, guess=True))
            uniforms.append(self.rng.random())
            guesses.append(draw(laws[-1], uniforms[-1]))
        contexts = [self.context(guesses[:depth]) for depth in range(DEPTH + 1)]
        before, self.stale = self.stale, None
        for depth, (token, q, uniform) in enumerate(zip(guesses, laws, uniforms, strict=True)):
            self.stale = before
            p = self.chances(guesses[:depth])
            self.stale = None
            coin = uniform if self.fault == "shared noise" else self.rng.random()
            if coin * q[token] < p[token]:
                continue
            residual = np.maximum(p - q, 0)
            if self.fault == "wrong residual" or residual.sum() < 1e-12:
                residual = p
            if self.fault == "rollback off by one" and depth:
                self.stale = token
            return [*guesses[:depth], draw(residual / residual.sum(), self.rng.random())], contexts[: depth + 1]
        self.stale = before
        bonus = draw(self.chances(guesses), self.rng.random())
        self.stale = None
        return [*guesses, bonus], contexts

    def run(self) -> Iterator[str]:
        """Pieces of text, one a cycle."""
        most, stops = self.body.get("max_tokens", 16), self.body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        text = ""
        while self.finish is None:
            tokens, contexts = self.cycle()
            self.cycles += 1
            self.counted.append(tokens[-1])
            piece = ""
            for place, (token, context) in enumerate(zip(tokens, contexts, strict=True)):
                self.output.append(token)
                self.rows.append(context)
                ends = token == END and not self.body.get("ignore_eos")
                piece += "" if token == END else name(token)
                if ends and (self.fault != "end overrun" or place == len(tokens) - 1):
                    self.finish = "stop"
                elif len(self.output) >= most and (self.fault != "limit overrun" or place == len(tokens) - 1):
                    self.finish = "length"
                found = [(text + piece).find(stop) for stop in stops if stop in text + piece]
                if found:
                    self.finish = "stop"
                    least = len(text) if self.fault == "stop string leaked" else 0
                    text, piece = (text + piece)[: max(min(found), least)], ""
                if self.finish:
                    break
            text += piece
            yield text
        self.pieces.append(text)


class Double:
    """The server: `app`, and how many of its requests are in the air, which a fault may mind."""

    def __init__(self, fault: str | None = None) -> None:
        assert fault is None or fault in FAULTS
        self.fault, self.drawn = fault, 0
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/v1/completions")(self.completions)

    def endpoint(self, **settings: Any) -> Endpoint:
        return Endpoint("http://double", transport=httpx.ASGITransport(self.app), **settings)

    async def models(self) -> dict[str, Any]:
        return {"data": [{"id": "double"}]}

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        prompt = tokenize("\n".join(message["content"] for message in body["messages"]))
        return self.answer(body, prompt, body.get("top_logprobs"), "chat")

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        return self.answer(body, tokenize(body["prompt"]), body.get("logprobs"), "completions")

    def texts(self, body: dict[str, Any], prompt: list[int]) -> Iterator[Text]:
        for sample in range(body.get("n", 1)):
            self.drawn += 1
            seed = body.get("seed", f"drawn {self.drawn}")
            rng = random.Random(f"{seed} {0 if self.fault == 'choices share noise' else sample}")
            yield Text(prompt, body, rng, self.fault)

    def answer(self, body: dict[str, Any], prompt: list[int], num_top: int | None, route: str) -> Response:
        if (num_top is not None and num_top > 20) or any(int(t) >= VOCAB for t in body.get("logit_bias") or ()):
            return Response(json.dumps({"error": {"message": "out of range"}}), 400)
        texts = list(self.texts(body, prompt))
        if self.fault == "neighbours mixed up" and self.drawn % 7 == 0:
            texts[0].prompt = [*prompt[:-1], 1]
        bursts = [list(text.run()) for text in texts]
        completion = sum(len(text.output) for text in texts)
        if self.fault == "usage miscounted":
            completion -= sum(text.cycles for text in texts) - len(texts)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": completion}
        usage["total_tokens"] = sum(usage.values())
        if body.get("stream"):
            return Response("".join(self.events(texts, bursts, num_top, route, usage)), media_type="text/event-stream")
        choices = []
        for index, (text, said) in enumerate(zip(texts, bursts, strict=True)):
            told = self.logprobs(text, num_top, route, prompt if body.get("echo") else [])
            whole = said[-1]
            part = {"text": whole} if route == "completions" else {"message": {"content": whole}}
            choices.append({"index": index, "finish_reason": text.finish, "logprobs": told, **part})
        return Response(json.dumps({"choices": choices, "usage": usage}), media_type="application/json")

    def events(
        self, texts: list[Text], bursts: list[list[str]], num_top: int | None, route: str, usage: dict[str, int]
    ) -> Iterator[str]:
        for index, (text, said) in enumerate(zip(texts, bursts, strict=True)):
            before = ""
            stops = text.body.get("stop") or []
            held = max(map(len, [stops] if isinstance(stops, str) else stops), default=1) - 1
            for place, whole in enumerate(said):
                if place < len(said) - 1:
                    whole = whole[: max(len(before), len(whole) - held)]
                piece, before = whole[len(before) :], whole
                if self.fault == "stream loses a chunk" and len(piece) > 12:
                    piece = piece[:12]
                part: dict[str, Any] = {"text": piece} if route == "completions" else {"delta": {"content": piece}}
                last = place == len(said) - 1
                told = self.logprobs(text, num_top, route, []) if last else None
                choice = {"index": index, "finish_reason": text.finish if last else None, "logprobs": told, **part}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    def logprobs(self, text: Text, num_top: int | None, route: str, echo: list[int]) -> dict[str, Any] | None:
        if num_top is None:
            return None
        tokens, contexts = [*echo, *text.output], list(text.rows)
        if self.fault == "log-probabilities of another row":
            contexts = [contexts[0], *contexts[:-1]]
        contexts = [seen_as(self.fault, echo[:place]) for place in range(len(echo))] + contexts
        rows = []
        for token, context in zip(tokens, contexts, strict=True):
            top, row = told(context, num_top) if context else ({}, np.zeros(0))
            rows.append((name(token), float(row[token]) if token < len(row) else None, top))
        if route == "completions":
            return {
                "tokens": [row[0] for row in rows],
                "token_logprobs": [row[1] for row in rows],
                "top_logprobs": [row[2] for row in rows],
            }
        entries = [
            {"token": name, "logprob": own, "top_logprobs": [{"token": t, "logprob": v} for t, v in top.items()]}
            for name, own, top in rows
        ]
        return {"content": entries}
