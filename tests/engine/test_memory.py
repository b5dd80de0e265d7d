"""The memory plan: never more than there is, whole contexts or a refusal, and a sentence for all that was lowered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.cache.pages import PageSpec
from outrider.drafters.tap_fed import HeldTaps
from outrider.engine.memory import GRAPHS, LEAST_ROWS, MARGIN, Room, Wishes, plan_memory, slot_bytes
from outrider.engine.rehearsal import pass_bytes, take_graphs
from outrider.errors import CapacityError, ConfigError
from outrider.models.device_memory import free_memory
from outrider.models.seats import Seats
from tests import artefacts
from tests.models.tiny import make_module, make_target, make_tokenizer

LARGE = Wishes(
    target=16 << 30,
    drafter=800 << 20,
    target_slot=128 << 10,
    drafter_slot=4 << 10,
    num_slots=None,
    block_size=16,
    max_context=8192,
    max_requests=64,
    max_rows=512,
    nodes=64,
    ranks=True,
    vocab_size=128_256,
)
"""An 8B with an EAGLE-3 head."""


def takes(rows: int, logit_rows: int) -> int:
    """Bytes of a pass, about an 8B's."""
    return rows * 300_000 + logit_rows * 128_256 * 4


def card(free: int) -> Room:
    return Room(free, free, MARGIN, graphs=True)


def test_a_large_card_holds_all_that_was_wished_for():
    plan = plan_memory(LARGE, card(60 << 30), takes)
    assert (plan.note, plan.max_rows, plan.nodes) == (None, 512, 64)
    assert plan.slots == 16 * (8192 + 32)
    assert plan.target_stack == plan.slots * LARGE.target_slot
    assert plan.graphs == takes(512, 512) + GRAPHS
    assert plan.taken + MARGIN <= 60 << 30


def test_a_small_one_narrows_passes_and_cuts_trees_with_a_sentence():
    plan = plan_memory(LARGE, card(3000 << 20), takes)
    assert plan.max_rows < 512
    assert f"passes are narrowed from 512 to {plan.max_rows} rows" in str(plan.note)
    tiny = plan_memory(LARGE, card(2450 << 20), takes)
    assert (tiny.max_rows, tiny.nodes) == (LEAST_ROWS, LEAST_ROWS - 1)
    assert "trees are cut from 64 to 15 nodes" in str(tiny.note)
    bare = plan_memory(LARGE, card(1700 << 20), takes)
    assert bare.graphs == 0
    assert "without a CUDA graph" in str(bare.note)


def test_what_does_not_fit_at_all_is_refused_with_the_remedy():
    with pytest.raises(
        CapacityError, match=r"8192 positions need 1,.* MiB of key-value slots and .* lower max_context"
    ):
        plan_memory(LARGE, card(1 << 30), takes)
    with pytest.raises(CapacityError, match="drafter='none'"):
        plan_memory(LARGE, card(1 << 30), takes)
    with pytest.raises(CapacityError, match=r"num_slots=1000000 needs .* lower num_slots"):
        plan_memory(replace(LARGE, num_slots=10**6), card(60 << 30), takes)
    with pytest.raises(CapacityError, match="raise num_slots"):
        plan_memory(replace(LARGE, num_slots=512), card(60 << 30), takes)


def test_a_pass_that_the_card_cannot_hold_is_narrowed():
    plan = plan_memory(LARGE, card(60 << 30), lambda rows, told: takes(rows, told) if rows <= 100 else None)
    assert plan.max_rows == 64
    assert plan.nodes == 63


@pytest.mark.parametrize("drafter", ["none", "small_model", "eagle3", "medusa"])
def test_seats_of_cycles_in_flight_are_in_the_plan_to_the_byte(folder, monkeypatch, drafter):
    """What is made for them at start, by the engine and by the drafter, is what was planned."""
    target = make_target(make_module("llama"), make_tokenizer())
    artefact = artefacts.settings(drafter, target) if drafter != "none" else {}
    given = {"self_test": False, "threads": 1, "num_slots": 1024, "drafter": drafter, "depth": 20, **artefact}
    assert LLM(folder, **given).resolved.memory.seats == 0
    made = 0
    for kind in (Seats, HeldTaps):
        make = kind.__init__

        def counted(self, *args, make=make, **kwargs):
            nonlocal made
            make(self, *args, **kwargs)
            made += sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))

        monkeypatch.setattr(kind, "__init__", counted)
    plan = LLM(folder, **given, in_flight=2, max_requests=5).resolved.memory
    assert plan.seats == made > 0
    assert plan.taken == plan.target_stack + plan.drafter_stack + plan.passes + plan.sampler + made


@settings(max_examples=200, deadline=None)
@given(
    free=st.integers(0, 1 << 36),
    usable=st.floats(0, 1),
    margin=st.sampled_from([0, MARGIN]),
    rows=st.integers(1, 2048),
    nodes=st.integers(0, 300),
    requests=st.integers(1, 256),
    context=st.integers(2, 200_000),
    block=st.sampled_from([1, 16, 64]),
    slots=st.none() | st.integers(1, 1 << 20),
    vocab=st.integers(1, 300_000),
    ranks=st.booleans(),
    seats=st.integers(0, 1 << 28),
)
def test_a_plan_is_never_more_than_there_is(
    free, usable, margin, rows, nodes, requests, context, block, slots, vocab, ranks, seats
):
    wishes = replace(
        LARGE,
        num_slots=slots,
        block_size=block,
        max_context=context,
        max_requests=requests,
        max_rows=rows,
        nodes=nodes,
        vocab_size=vocab,
        ranks=ranks,
        seats=seats,
    )
    room = Room(free, int(free * usable), margin, graphs=bool(margin))
    try:
        plan = plan_memory(wishes, room, takes)
    except CapacityError:
        return
    assert plan.taken + margin <= room.usable
    assert plan.seats == seats
    assert plan.slots >= context + block
    assert plan.slots % block == 0
    assert 1 <= plan.max_rows <= rows
    assert plan.nodes <= min(nodes, plan.max_rows - 1)
    # Laws, and a drafter's own, for every row that has logits.
    told = min(plan.max_rows, requests * (1 + plan.nodes))
    assert plan.passes >= takes(plan.max_rows, told)
    assert plan.sampler >= told * vocab * (20 if ranks else 8)
    lowered = plan.max_rows < rows or plan.nodes < nodes or bool(margin and not plan.graphs)
    assert lowered == (plan.note is not None)
    assert plan.to_json()["taken"] == plan.taken
    assert plan.sentence()
    assert all(text.endswith("MiB") for text in plan.table().values())


def test_a_share_of_a_cpu_is_of_what_is_free():
    device = torch.device("cpu")
    part, whole = Room.of(device, 0.5), Room.of(device, None, asked=True)
    assert part.usable == pytest.approx(0.5 * free_memory(device), rel=0.2)
    assert whole.usable == whole.free


def test_on_a_gpu_a_share_counts_what_is_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert Room.of(torch.device("cuda"), 0.95) == Room(60 << 30, 56 << 30, MARGIN, graphs=True)


def test_slots_count_keys_and_values_of_every_layer():
    assert slot_bytes([PageSpec(8, 128, 128)] * 32, torch.bfloat16) == 32 * 8 * 256 * 2


def test_a_pass_is_counted_by_its_rows_and_its_logits():
    target = make_target(make_module("llama"))
    count = pass_bytes(target, 16, 64)
    assert count(16, 16) == 4 * (16 * (8 * 32 + 4 * 64) + 16 * 128)
    assert count(32, 1) == 4 * (32 * (8 * 32 + 4 * 64) + 128)
    assert pass_bytes(target, 16, 64, taps=(1, 2))(1, 0) == 4 * (10 * 32 + 4 * 64)


def test_graphs_are_taken_the_largest_first(monkeypatch):
    target = make_target(make_module("llama"))
    widths = []
    monkeypatch.setattr(type(target), "forward", lambda self, batch, pages, **given: widths.append(batch.num_rows))
    take_graphs(target, target.make_pages(32), 48, 16)
    assert widths == [], "nothing runs as a graph on a CPU"
    target.model.graphs = object()
    take_graphs(target, target.make_pages(32), 48, 16)
    assert widths == [16], "a module's passes all have one width"
    target = replace(target, fixed_width=None)
    take_graphs(target, target.make_pages(32), 48, 16)
    assert widths[1:] == [48, 32, 16, 8, 4, 2, 1]
    take_graphs(target, target.make_pages(32), 1000, 16)
    assert widths[8] == 512, "wider passes have no graph"


@pytest.fixture
def folder(tmp_path) -> str:
    make_module("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def test_an_engine_short_of_memory_guesses_less_and_says_the_same(folder, monkeypatch):
    given = {"self_test": False, "threads": 1, "kernels": "plain", "drafter": "suffix", "depth": 20, "max_context": 90}
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    rich = LLM(folder, **given)
    assert (rich.resolved.max_rows, rich.resolved.depth, rich.resolved.notes) == (512, 20, ())
    room = Room(1 << 30, 200_000, 0)
    monkeypatch.setattr("outrider.engine.resolve.Room.of", lambda device, share, asked: room)
    poor = LLM(folder, **given)
    (note,) = poor.resolved.notes
    assert "passes are narrowed from 512 to 16 rows, trees are cut from 20 to 15 nodes" in note
    assert (poor.resolved.max_rows, poor.resolved.depth, poor.resolved.nodes) == (16, 15, 15)
    assert poor.resolved.memory.taken <= 200_000
    prompt = [5, 6, 7] * 4
    assert poor.generate(prompt, params)[0].token_ids == rich.generate(prompt, params)[0].token_ids


def test_slots_for_no_context_are_refused(folder):
    with pytest.raises((CapacityError, ConfigError), match="num_slots"):
        LLM(folder, self_test=False, threads=1, kernels="plain", num_slots=64, max_context=90)
