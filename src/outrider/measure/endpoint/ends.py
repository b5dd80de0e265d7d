"""Where texts end, and what is counted: max_tokens, stop strings, the model's own end, and usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.measure.endpoint.answers import Reply
from outrider.measure.endpoint.findings import Finding
from outrider.measure.endpoint.subject import Subject, outcome

CUTS = (1, 2, 3, 4, 5, 6, 7, 9, 12, 16)
"""Values of max_tokens: a limit has to fall on every place of a cycle."""
PROMPTS = 3
"""Prompts of tests that ask many things of each."""
ENDED = 6
"""Texts that ended by themselves, which are asked for again with less room."""


async def limits(subject: Subject) -> Finding:
    """The same greedy text, cut."""
    problems, cases = [], []
    for number, full in enumerate(subject.greedy[:PROMPTS]):
        length = len(full.only.rows) or (full.usage or {}).get("completion_tokens", 0)
        cases += [(number, full, cut) for cut in CUTS if cut < length]
    replies = await subject.endpoint.ask_all([subject.ask(number, max_tokens=cut) for number, _, cut in cases])
    for (number, full, cut), reply in zip(cases, replies, strict=True):
        where = f"prompt {number}, max_tokens {cut}"
        counted = (reply.usage or {}).get("completion_tokens", cut)
        if reply.only.tokens != full.only.tokens[: len(reply.only.tokens)] or not _begins(full, reply):
            problems.append(f"{where}: another text")
        elif reply.only.rows and len(reply.only.rows) != cut:
            problems.append(f"{where}: {len(reply.only.rows)} tokens")
        elif counted != cut:
            problems.append(f"{where}: usage counts {counted}")
        elif reply.only.finish != "length":
            problems.append(f"{where}: ended by {reply.only.finish!r}")
    return outcome(
        "max_tokens",
        problems,
        len(cases),
        "a text is cut exactly, and nothing else changes",
        "A cycle that reaches the limit must deliver exactly what is left, and tell the reason length.",
    )


def _begins(full: Reply, cut: Reply) -> bool:
    """Characters that were cut in the middle are shown as U+FFFD."""
    return full.only.text.startswith(cut.only.text.rstrip("\ufffd"))


async def stops(subject: Subject) -> Finding:
    """Pieces of the greedy texts as stop strings, whole and streamed."""
    cases: list[tuple[int, Any, str]] = []
    for number, reply in enumerate(subject.greedy[:PROMPTS]):
        text, pieces = reply.only.text, list(_pieces(reply.only.text))
        cases += [(number, piece, text[: text.find(piece)]) for piece in pieces]
        starts = {piece: text.find(piece) for piece in pieces}
        for first in pieces:
            # Which of two is the earlier match is plain where it begins first and is complete first.
            later = [p for p in pieces if starts[p] > starts[first] and starts[p] + len(p) > starts[first] + len(first)]
            if later:
                cases.append((number, [first, *later[:3]], text[: starts[first]]))
    asks = [subject.ask(number, stop=stop) for number, stop, _ in cases]
    whole, streamed = await subject.endpoint.ask_all(asks), await subject.endpoint.stream_all(asks)
    problems = []
    for (number, stop, expected), *replies in zip(cases, whole, streamed, strict=True):
        for kind, reply in zip(("", ", streamed"), replies, strict=True):
            where, said = f"prompt {number}, stop {stop!r}{kind}", reply.only if reply.samples else None
            if said is None or said.text != expected:
                problems.append(f"{where}: the text is {said and said.text!r}, not {expected!r}")
            elif said.finish != "stop":
                problems.append(f"{where}: ended by {said.finish!r}")
    return outcome(
        "stop",
        problems,
        2 * len(cases),
        "texts end before the earliest stop string",
        "Text must be held back while it could begin a stop string, which may span tokens and cycles, and nothing "
        "behind the earliest match be delivered.",
    )


def _pieces(text: str) -> Iterator[str]:
    """Short pieces of a text from several places, none of which is at its beginning, or only white."""
    found = set()
    for part in range(1, 6):
        start = len(text) * part // 6
        piece = text[start : start + 1 + part % 4]
        if piece.strip() and "\ufffd" not in piece and text.find(piece) > 0 and piece not in found:
            found.add(piece)
            yield piece


async def own_end(subject: Subject) -> Finding:
    """Drawn texts that ended by themselves: nothing behind the end, and the same end with less room."""
    name, seeds = "end of text", range(subject.plan.seed, subject.plan.seed + 16)
    asks = [
        subject.ask(number, temperature=1, seed=seed, max_tokens=subject.plan.max_tokens)
        for number in range(min(PROMPTS, len(subject.prompts)))
        for seed in seeds
    ]
    replies = await subject.endpoint.ask_all(asks)
    ended = [(ask, r) for ask, r in zip(asks, replies, strict=True) if r.only.finish == "stop"]
    if not ended:
        return Finding(name, "untested", f"no text ended within {subject.plan.max_tokens} tokens: raise --max-tokens")
    ends = {r.only.tokens[-1] for _, r in ended if _is_silent(r)}
    problems = [
        f"a token that ends texts ({token!r}) stands at {place} of {len(reply.only.rows)}"
        for reply in replies
        for place, token in enumerate(reply.only.tokens[:-1])
        if token in ends
    ]
    cut = []
    for ask, reply in ended[:ENDED]:
        length = (reply.usage or {}).get("completion_tokens", 0)
        cut += [(reply, ask.but(max_tokens=most)) for most in range(max(1, length - 6), length)]
    for (full, ask), reply in zip(cut, await subject.endpoint.ask_all([ask for _, ask in cut]), strict=True):
        if reply.only.finish == "stop" and _begins(full, reply):
            room = ask.fields["max_tokens"]
            problems.append(f"with max_tokens {room} a text ends by itself, and with more room it goes on")
    return outcome(
        name,
        problems,
        len(replies) + len(cut),
        f"{len(ended)} texts ended by themselves, nothing came behind",
        "An end token within a run of accepted guesses must end the text there: tokens behind it were delivered.",
    )


def _is_silent(reply: Reply) -> bool:
    """Is the last token one that is not in the text, as end tokens are?"""
    tokens = reply.only.tokens
    return bool(tokens and tokens[-1].strip() and not reply.only.text.endswith(tokens[-1]))


async def usage(subject: Subject) -> Finding:
    """Counts against the tokens that were told, whole and streamed, one choice and several."""
    asks = [subject.ask(number) for number in subject.few]
    if subject.samples > 1:
        asks += [subject.ask(number, n=3, temperature=1, seed=subject.plan.seed) for number in subject.few]
    whole, streamed = await subject.endpoint.ask_all(asks), await subject.endpoint.stream_all(asks)
    problems = []
    for index, (reply, stream) in enumerate(zip(whole, streamed, strict=True)):
        number = index % len(subject.few)
        before = (subject.greedy[number].usage or {}).get("prompt_tokens")
        for kind, each in (("", reply), (", streamed", stream)):
            wrong = _miscounted(each, before, bool(subject.num_top))
            if wrong:
                problems.append(f"prompt {number}, {len(each.samples)} choices{kind}: {wrong}")
    return outcome(
        "usage",
        problems,
        2 * len(asks),
        "counts are those of the tokens told",
        "completion_tokens counts what was delivered: not guesses, not cycles, and the target's own token with them.",
    )


def _miscounted(reply: Reply, prompt_tokens: Any, has_rows: bool) -> str | None:
    told = reply.usage
    if told is None:
        return "no usage is told, or one without both counts"
    if told.get("total_tokens") != told.get("prompt_tokens", 0) + told.get("completion_tokens", 0):
        return f"the total is no sum: {told}"
    if told["prompt_tokens"] != prompt_tokens:
        return f"prompt_tokens is {told['prompt_tokens']}, and {prompt_tokens} before"
    rows = sum(len(sample.rows) for sample in reply.samples)
    unseen = sum(
        sample.finish == "stop" for sample in reply.samples
    )  # end tokens that some servers count and do not tell
    if has_rows and not rows <= told["completion_tokens"] <= rows + unseen:
        return f"completion_tokens is {told['completion_tokens']}, and {rows} tokens are told"
    return None
