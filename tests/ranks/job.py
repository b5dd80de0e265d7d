"""What every rank of a job of the tests runs (`processes.start`).

All ranks run the same patches, which only write down what the product's own code did on that rank.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.cache.pages import Pages
from outrider.engine.step import Engine
from outrider.errors import ModelError, OutriderError
from outrider.models.batch import BatchBuilder
from outrider.models.lean import LeanModel
from outrider.models.loader import load
from outrider.models.ranks import follow, part
from outrider.models.ranks.group import Ranks
from outrider.models.ranks.lead import LedPages
from outrider.models.ranks.meet import meet
from tests import artefacts
from tests.models.tiny import make_module, make_tokenizer
from tests.ranks.linked import exchanges
from tests.ranks.processes import write

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
LARGER = {"hidden_size": 256, "intermediate_size": 512}
"""For a GPU: heads of 64, as real models have."""
ROWS = 400
"""Slots of the stack whose rows' bits are written down."""
WIDTHS = (1, 16, 64)
PROMPTS = [tuple(range(5 + i, 12 + 3 * i)) for i in range(4)]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=3, top_p=0.95, logprobs=1)
LITTLE = "little-memory"
"""Once a file of this name is there, another rank says that it has little memory."""

ELSEWHERE = 77
"""Threads that only rank 0 has."""


def size() -> int:
    return int(os.environ["WORLD_SIZE"])


def device() -> str:
    return os.environ.get("DEVICE", "cpu")


def little() -> int:
    """Bytes for some 17 blocks of one layer, where four requests want 24, and for what a pass takes beside them."""
    return 118_000 + 17 * 16 * 2 * 8 * 4 * HEADS["num_key_value_heads"] // size()


def model(folder: Path, name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> str:
    """A folder with random weights, written once."""
    path = folder / f"{name}-{str(dtype)[6:]}-{'-'.join(f'{key}={value}' for key, value in settings.items())}"
    if not path.is_dir():
        make_module(name, dtype, **{**HEADS, **(LARGER if device() == "cuda" else {}), **settings}).save_pretrained(
            path
        )
        make_tokenizer().save_pretrained(path)
    return str(path)


def opened(path: str, **settings: Any) -> LLM:
    return LLM(
        path,
        **{"tensor_parallel": size(), "threads": 1, "max_context": 96, "max_rows": 64, "device": device(), **settings},
    )


def sums(ranks: Ranks) -> dict[str, list[bool]]:
    """By width: whether a row's sum has the bits of the row alone, and those of the order of ranks."""
    seeds = [torch.Generator().manual_seed(seed) for seed in range(size() + 1)]
    rows = [(torch.randn(64, 33, generator=seed) * 10**rank).to(device()) for rank, seed in enumerate(seeds[1:])]
    to = torch.randn(64, 33, generator=seeds[0]).to(device())
    alone = torch.cat([ranks.add(rows[ranks.rank][i : i + 1], to[i : i + 1]) for i in range(64)])
    expected = to
    for part_of_rank in rows:
        expected = expected + part_of_rank
    found = {}
    for width in WIDTHS:
        starts = range(0, 64, width)
        many = torch.cat([ranks.add(rows[ranks.rank][i : i + width], to[i : i + width]) for i in starts])
        found[str(width)] = [torch.equal(many, alone), torch.equal(many, expected)]
    half = rows[ranks.rank].bfloat16()
    ordered = sum((row.bfloat16().float() for row in rows[1:]), rows[0].bfloat16().float()).bfloat16()
    found["rounded once"] = [torch.equal(ranks.sum(half), ordered), True]
    return found


class Books:
    """What this rank's stacks hold, by what it was told to do: tokens by slot, and which of them became known."""

    def __init__(self, path: Path, rank: int) -> None:
        self.num_followed = 0
        self.bits: dict[str, set[str]] = defaultdict(set)
        self._file = path.open("w")
        self._slots: WeakKeyDictionary[Pages, dict[int, int]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Pages, dict[int, int]] = WeakKeyDictionary()
        run, compact, follow_walks = LeanModel.forward, Pages.compact, Pages.follow

        def shared(pages: Pages) -> bool:
            return rank != 0 or isinstance(pages, LedPages)  # rank 0 has models of its own, too

        def forward(
            body: LeanModel,
            tokens: Tensor,
            positions: Tensor,
            slots: Tensor,
            keys: Any,
            pages: Pages,
            *rest: Any,
            **named: Any,
        ) -> Any:
            result = run(body, tokens, positions, slots, keys, pages, *rest, **named)
            if pages.num_slots == ROWS:
                self._digest(tokens, positions, slots, pages)
            if shared(pages):
                self._read(tokens, positions, slots, keys, pages)
            return result

        def moved(pages: Pages, source: list[int], target: list[int]) -> None:
            if source and shared(pages):
                held = self._slots[pages]
                held |= dict(zip(target, [held[slot] for slot in source], strict=True))
            compact(pages, source, target)

        def followed(pages: Pages, *walks: Any) -> None:
            self.num_followed += 1
            follow_walks(pages, *walks)

        LeanModel.forward = forward  # type: ignore[method-assign]
        Pages.compact = moved  # type: ignore[method-assign]
        Pages.follow = followed  # type: ignore[method-assign]

    def close(self, folder: Path, rank: int) -> None:
        bits = {row: len(bits) for row, bits in self.bits.items()}
        write(folder, f"kept-{rank}", {"bits": bits, "followed": self.num_followed})

    def _digest(self, tokens: Tensor, positions: Tensor, slots: Tensor, pages: Pages) -> None:
        for token, position, slot in zip(tokens.tolist(), positions.tolist(), slots.tolist(), strict=True):
            written = torch.cat([page[slot].flatten() for page in (*pages.keys, *pages.values)])
            self.bits[f"{token} at {position}"].add(
                hashlib.sha256(written.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
            )

    def _read(self, tokens: Tensor, positions: Tensor, slots: Tensor, keys: Any, pages: Pages) -> None:
        """Before a pass writes: which ids of each of its requests this rank has come to know."""
        held, size = self._slots.setdefault(pages, {}), keys.block_size
        known, seen = self._known.setdefault(pages, {}), set()
        for request, position in zip(keys.request.tolist(), positions.tolist(), strict=True):
            if request in seen:
                continue
            seen.add(request)
            table = keys.tables[request].tolist()
            since = known.get(table[0], 0)
            since = since if since <= position else 0
            ids = [held.get(table[p // size] * size + p % size, -1) for p in range(since, position)]
            known[table[0]] = position
            self._file.write(f"{pages.num_slots} {table[0]} {since} {ids}\n")
        held |= dict(zip(slots.tolist(), tokens.tolist(), strict=True))
        self._file.flush()


def rows(llm: LLM) -> dict[str, bool]:
    """By width: whether 64 rows have the logits that each of them has alone."""
    target = llm.engine.target
    stack, table = target.make_pages(ROWS), [1, 2, 3, 4]
    context = BatchBuilder(16)
    context.request(table)
    context.line(0, list(range(3, 63)), 1)
    target.forward(context.build(target.device), stack)
    alone: list[Tensor] = []
    found = {}
    for place, width in enumerate(WIDTHS):
        said = []
        for start in range(0, 64, width):
            batch = BatchBuilder(16)
            batch.request(table)
            for row in range(start, start + width):
                batch.node(64 + row, 20 + row % 40, [100 + 64 * place + row])
            said.append(target.forward(batch.build(target.device), stack).logits)
        alone = alone or said
        found[str(width)] = torch.equal(torch.cat(said), torch.cat(alone))
    return found


def repeated(ranks: Ranks) -> list[int]:
    """What the others answer to an order that was kept, as for a graph, each time that it is repeated."""
    with ranks.keeping() as orders, ranks.order("memory"):
        pass
    found = []
    for _ in range(2):
        with ranks.repeating(orders):
            found.append(ranks.least(1 << 62))
    return found


def distance(llm: LLM, path: str) -> float:
    """Of logits from those of the whole model, which one process has, as a share of their spread."""
    batch, said = BatchBuilder(16), []
    batch.request([1, 2])
    batch.line(0, list(range(3, 23)), 20)
    for target in (llm.engine.target, load(path, threads=1, device=device())):
        said.append(target.forward(batch.build(target.device), target.make_pages(64)).logits)
    return float((said[0] - said[1]).abs().max() / said[1].std())


def texts(llm: LLM, depth: int = 0, width: int | None = None) -> tuple[list[Any], int]:
    """Greedy and seeded ones, with what is told of them, and how many guesses came true; `depth` in every cycle."""
    with llm.always_guessing(depth, width):
        results = [result for params in (GREEDY, SEEDED) for result in llm.generate(PROMPTS, params)]
        results += llm.generate(PROMPTS[0], SEEDED)
    told = [[row.logprob for row in result.logprobs or ()] for result in results]
    said = [[result.token_ids, logprobs] for result, logprobs in zip(results, told, strict=True)]
    return said, sum(result.tally.accepted for result in results)


def compared(path: str, drafters: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By drafter: whether its texts are the plain ones, and how many of its guesses came true."""
    plain = opened(path, drafter="none", num_slots=2048, self_test=False)
    (expected, _), found = texts(plain), {}
    for drafter, settings in drafters.items():
        trained = artefacts.settings(drafter, plain.engine.target)
        llm = opened(path, drafter=drafter, num_slots=2048, self_test=False, **trained, **settings)
        said, accepted = texts(llm, 3, settings.get("width"))
        found[drafter] = {"same": said == expected, "accepted": accepted, "way": llm.resolved.way}
    return found


def refusals(folder: Path) -> dict[str, str]:
    asked = {
        "heads": (model(folder, "llama", num_key_value_heads=1), {}),
        "plan": (model(folder, "gpt2"), {}),
        "packed": (model(folder, "llama"), {"dtype": "packed"}),
        "elsewhere": (model(folder, "llama"), {"threads": ELSEWHERE}),
        "size": (model(folder, "llama"), {"tensor_parallel": size() + 1}),
        "device": (model(folder, "llama"), {"device": "cpu:0"}),
    }
    said = {}
    for name, (path, settings) in asked.items():
        try:
            opened(path, **settings)
            said[name] = "it went on"
        except OutriderError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def long_run(path: str, cycles: int) -> dict[str, Any]:
    """Requests up to the end of the context, while another rank has little memory; so many cycles of them."""
    llm = opened(path, drafter="ngram", max_requests=4, memory_share=1.0, self_test=False)
    count, said = 0, []

    def watched(_emissions: Any, _record: Any) -> None:
        nonlocal count
        count += 1

    with llm.always_guessing(3):
        seed = 0
        while count < cycles:
            params = [SamplingParams(temperature=0.7, seed=seed + i, ignore_eos=True) for i in range(4)]
            results = llm.generate(PROMPTS, params, watch=watched)
            said += [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, results, strict=True)]
            seed += 4
    memory, scheduler = llm.resolved.memory, llm.engine.scheduler
    return {
        "cycles": count,
        "slots": memory.slots,
        "free": memory.free,
        "preemptions": scheduler.num_preemptions,
        "texts": said,
        "ends": sorted({len(text) for text in said}),
    }


def engine(folder: Path, ranks: Ranks, cycles: int) -> None:
    """Everything that holds while all is well."""
    write(folder, f"sums-{ranks.rank}", sums(ranks))
    Ranks.can_be_captured = False  # type: ignore[assignment, method-assign]  # nothing is written down at a replay
    books = Books(folder / f"books-{ranks.rank}.txt", ranks.rank)
    if not ranks.leads:
        part.select = _unless_elsewhere(part.select)  # type: ignore[attr-defined]
        follow.free_memory = lambda _: little() if (folder / LITTLE).exists() else 1 << 60  # type: ignore[attr-defined]
        try:
            LLM("whatever rank 0 says", tensor_parallel=size(), device=device())
        finally:
            books.close(folder, ranks.rank)
    llama = model(folder, "llama")
    llm = opened(llama, drafter="none", self_test=True, num_slots=2048)
    told: dict[str, Any] = {"report": str(llm.resolved.probe), "lines": llm.resolved.lines()}
    told |= {"rows": rows(llm), "distance": distance(llm, llama), "repeated": repeated(ranks)}
    del llm
    flying = {"width": 2, "in_flight": 2}
    told["lean"] = compared(llama, {"ngram": {}, "early_exit": {"exit_layers": 2, **flying}, "eagle3": {"width": 2}})
    told["biased"] = compared(model(folder, "llama_bias", torch.bfloat16), {"suffix": {}})
    told["module"] = compared(model(folder, "gemma2"), {"ngram": {}})
    told["refusals"] = refusals(folder)
    (folder / LITTLE).touch()
    told["long"] = long_run(model(folder, "llama", num_hidden_layers=1), cycles)
    books.close(folder, ranks.rank)
    write(folder, "told", told)


def _unless_elsewhere(select: Any) -> Any:
    def chosen(kernels: str, place: torch.device, threads: int | None) -> Any:
        if threads == ELSEWHERE:
            raise ModelError("they are not on this machine")
        return select(kernels, place, threads)

    return chosen


def linked(folder: Path, ranks: Ranks) -> None:
    write(folder, f"exchanges-{ranks.rank}", exchanges(folder, ranks))
    if not ranks.leads:
        follow.follow(ranks)


def captured(folder: Path, ranks: Ranks) -> None:
    """Cycles in the air, on a GPU as one graph each, against plain texts in lockstep."""
    if not ranks.leads:
        LLM("nothing", tensor_parallel=size(), device=device())
    path, fixed = model(folder, "llama"), {"num_slots": 2048, "self_test": False}
    laws = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=heat, seed=3) for heat in (0.0, 1.0)]
    plain = opened(path, drafter="none", in_flight=0, **fixed)
    expected = [result.token_ids for law in laws for result in plain.generate(PROMPTS, law)]
    told: dict[str, Any] = {"note": ranks.note}
    drafters = {"none": {}, "early_exit": {"exit_layers": 2, "width": 2}, "eagle3": {"width": 2}}
    for drafter, settings in drafters.items():
        trained = artefacts.settings(drafter, plain.engine.target)
        llm = opened(path, drafter=drafter, in_flight=2, **fixed, **trained, **settings)
        with llm.always_guessing(3, settings.get("width")):
            said = [result.token_ids for law in laws for result in llm.generate(PROMPTS, law)]
        pipeline = llm.engine.pipeline
        told[drafter] = {"same": said == expected, "graphs": pipeline.num_captured, "note": pipeline.note}
    write(folder, "told", told)


def endless(folder: Path, ranks: Ranks) -> None:
    """Texts without end, until a rank is lost."""
    if not ranks.leads:
        LLM("nothing", tensor_parallel=size(), device=device())
    llm = opened(model(folder, "llama"), drafter="ngram", num_slots=2048, self_test=False)
    write(folder, "runs", True)
    while True:
        llm.generate(PROMPTS, GREEDY)


def idle(folder: Path, ranks: Ranks) -> None:
    """A server to which nobody comes."""
    if not ranks.leads:
        LLM("nothing", tensor_parallel=size(), device=device())
    llm = opened(model(folder, "llama"), drafter="none", num_slots=2048, self_test=False)
    write(folder, "runs", llm.resolved.way)
    time.sleep(600)


def run(folder: str, scenario: str, words: Sequence[Any]) -> None:
    """A rank; the environment is as `torchrun` makes it."""
    torch.set_num_threads(1)
    Engine.strict = True
    ranks = meet(size(), device())
    scenarios = {"engine": engine, "captured": captured, "linked": linked, "endless": endless, "idle": idle}
    scenarios[scenario](Path(folder), ranks, *words)
