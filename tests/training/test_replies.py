"""The target's own replies: equal to `generate`, whole after a kill, shared by processes, and without prompts."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, pre_tokenizers

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from outrider.training import shards
from outrider.training.replies import ReplySettings, generate_replies
from outrider.training.turns import opening
from tests.models.tiny import make_module, make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ 'w3 ' if m.role == 'user' else 'w4 ' }}{{ m.content }} w2 {% endfor %}"
    "{% if add_generation_prompt %}w4{% endif %}"
)
SETTINGS = ReplySettings(max_tokens=12, seed=7)


@dataclass(frozen=True)
class Asked:
    content: object


PROMPTS = [Asked(f"w{10 + i} w{20 + i}") for i in range(12)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_module("llama", max_position_embeddings=400).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Without it the end token "w2" would be found in the word "w27".
    tokenizer.add_special_tokens({"eos_token": AddedToken("w2", single_word=True)})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return LLM(str(folder), drafter="none", kernels="plain", max_requests=5, max_rows=64, num_slots=4000, threads=1)


def conversations(folder):
    """Every conversation of a corpus: (job, temperature, prompt, reply), by job."""
    found = []
    for path in sorted(folder.glob("shard-*.safetensors")):
        shard = load_file(path)
        starts = shard["starts"].tolist()
        assert shard["tokens"].dtype == torch.int32
        assert starts[-1] == len(shard["tokens"])
        for i, (start, stop) in enumerate(itertools.pairwise(starts)):
            tokens, offset = shard["tokens"][start:stop].tolist(), int(shard["replies"][i])
            heat = round(float(shard["temperatures"][i]), 3)
            found.append((int(shard["jobs"][i]), heat, tuple(tokens[:offset]), tuple(tokens[offset:])))
    return sorted(found)


@pytest.fixture(scope="module")
def whole(llm, tmp_path_factory):
    """Every prompt once, by one process, in one shard."""
    folder = tmp_path_factory.mktemp("whole")
    summary = generate_replies(llm, PROMPTS, folder, SETTINGS)
    return folder, summary, conversations(folder)


def test_replies_are_what_generate_says(llm, whole, monkeypatch):
    folder, summary, found = whole
    assert [job for job, *_ in found] == list(range(12))
    assert {heat for _, heat, *_ in found} == {0.0, 0.7, 1.0}
    asked = []
    add = llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda request, text: (asked.append(request), add(request, text)))
    generate_replies(llm, PROMPTS, folder.parent / "again", SETTINGS)
    assert conversations(folder.parent / "again") == found
    monkeypatch.undo()
    seeds = {request.prompt: request.seed for request in asked}
    assert len(set(seeds.values())) == 12
    for job, heat, prompt, reply in found:
        assert prompt == llm.encode(PROMPTS[job].content)
        params = SamplingParams(temperature=heat, seed=seeds[prompt], max_tokens=12)
        (alone,) = llm.generate(PROMPTS[job].content, params)
        assert reply == alone.token_ids
    assert summary["conversations"] == 12
    assert summary["reply_tokens"] == sum(len(reply) for *_, reply in found)
    assert summary["tokens"] == sum(len(prompt) + len(reply) for *_, prompt, reply in found)
    assert summary == json.loads((folder / "corpus.json").read_text())
    (path,) = folder.glob("shard-*")
    assert summary["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_killed_run_goes_on_and_ends_with_the_same(llm, whole, tmp_path, monkeypatch):
    small = ReplySettings(max_tokens=12, seed=7, shard_tokens=40)
    writes = []

    def killed(folder, number, shard, settings, write=shards.write_shard):
        write(folder, number, shard, settings)
        writes.append(number)
        if len(writes) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("outrider.training.replies.write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        generate_replies(llm, PROMPTS, tmp_path, small)
    monkeypatch.undo()
    before = conversations(tmp_path)
    assert 0 < len(before) < 12
    kept = {path: path.read_bytes() for path in tmp_path.glob("shard-*")}
    assert llm.engine.scheduler.is_idle, "what was under way was given up"
    summary = generate_replies(llm, PROMPTS, tmp_path, small)
    assert conversations(tmp_path) == whole[2]
    assert summary["conversations"] == 12
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert generate_replies(llm, PROMPTS, tmp_path, small) == summary, "nothing is missing, so nothing is done"


def test_processes_share_a_folder(llm, whole, tmp_path):
    for rank in (1, 0):
        summary = generate_replies(llm, PROMPTS, tmp_path, SETTINGS, rank=rank, world=2)
    assert conversations(tmp_path) == whole[2]
    assert {path.stem for path in tmp_path.glob("shard-*")} == {"shard-00000", "shard-00001"}
    jobs = [set(load_file(path)["jobs"].tolist()) for path in sorted(tmp_path.glob("shard-*"))]
    assert jobs == [set(range(0, 12, 2)), set(range(1, 12, 2))]
    assert summary["conversations"] == 12


def test_a_rank_without_a_prompt_ends_well_with_a_note(llm, tmp_path):
    """Whichever of the two comes first."""
    for rank in (1, 0):
        told = []
        summary = generate_replies(llm, PROMPTS[:1], tmp_path, SETTINGS, rank=rank, world=2, progress=told.append)
        assert summary["conversations"] == 1 - rank
        notes = [progress.note for progress in told if progress.note]
        assert notes == (["rank 1 of 2 has no reply to add (the prompts, 1, are fewer than the processes)"] * rank)
    with pytest.raises(ConfigError, match="no reply could be kept"):
        generate_replies(llm, [Asked([])], tmp_path / "alone", SETTINGS)
    told = []
    generate_replies(llm, [Asked([])], tmp_path / "other", SETTINGS, world=2, progress=told.append)
    assert "rank 0 of 2 has no reply to add" in told[-1].note


def test_ranks_without_a_prompt_of_their_own_ask_again(llm, tmp_path):
    settings = ReplySettings(max_tokens=12, num_tokens=200, temperatures=((1.0, 1.0),))
    for rank in (1, 0):
        summary = generate_replies(llm, PROMPTS[:1], tmp_path, settings, rank=rank, world=2)
    assert summary["reply_tokens"] >= 200
    assert {job % 2 for job, *_ in conversations(tmp_path)} == {0, 1}


def test_a_run_that_asks_again_goes_on_after_a_kill(llm, tmp_path):
    """All prompts were asked once already, and the first that it asks now is asked again."""
    few = ReplySettings(max_tokens=12, num_tokens=20, temperatures=((1.0, 1.0),), shard_tokens=1)
    generate_replies(llm, PROMPTS[:1], tmp_path, few)
    more = ReplySettings(max_tokens=12, num_tokens=100, temperatures=((1.0, 1.0),), shard_tokens=1)
    assert generate_replies(llm, PROMPTS[:1], tmp_path, more)["reply_tokens"] >= 100


def test_prompts_are_asked_again_until_there_is_enough(llm, tmp_path):
    settings = ReplySettings(max_tokens=12, num_tokens=400, temperatures=((0.0, 0.5), (1.0, 0.5)))
    seen = []
    summary = generate_replies(llm, PROMPTS, tmp_path, settings, progress=seen.append)
    found = conversations(tmp_path)
    assert 400 <= summary["reply_tokens"] < 400 + 5 * 12
    assert seen[-1].reply_tokens == summary["reply_tokens"]
    assert max(job for job, *_ in found) >= 24
    assert {heat for job, heat, *_ in found if job >= 12} == {1.0}, "a greedy reply would only come again"
    assert len({reply for job, _, _, reply in found if job % 12 == 3}) > 1


def test_without_prompts_the_target_asks_itself(llm, tmp_path):
    before, ends = opening(llm, [])
    assert (before, ends) == ((3,), (2,))
    settings = ReplySettings(num_tokens=1000, max_tokens=120, follow_up=0.8)
    summary = generate_replies(llm, None, tmp_path, settings)
    found = conversations(tmp_path)
    assert summary["reply_tokens"] >= 1000
    assert all(prompt[0] == 3 and prompt[-2:] == (2, 4) for _, _, prompt, _ in found)
    assert len({prompt for _, _, prompt, _ in found}) == len(found), "no two prompts are the same"
    follow_ups = [(first, second) for first, second in itertools.pairwise(found) if first[0] == second[0]]
    assert follow_ups
    for (_, _, prompt, reply), (_, _, longer, _) in follow_ups:
        assert longer[: len(prompt) + len(reply)] == (*prompt, *reply)
        assert longer[len(prompt) + len(reply)] == 3
    again = tmp_path / "again"
    generate_replies(llm, None, again, settings)
    assert conversations(again) == found


def test_bad_prompts_cost_nothing_but_themselves(llm, tmp_path):
    long, empty = Asked("w5 " * 500), Asked([])
    summary = generate_replies(llm, [long, *PROMPTS[:3], empty], tmp_path, SETTINGS)
    assert summary["left_out"] == {"prompts refused": 2}
    assert [job for job, *_ in conversations(tmp_path)] == [1, 2, 3]
    endless = ReplySettings(num_tokens=1000)
    with pytest.raises(ConfigError, match="longer than the context"):
        generate_replies(llm, [long], tmp_path / "none", endless)


def test_a_full_disk_keeps_what_was_written(llm, tmp_path, monkeypatch):
    small = ReplySettings(max_tokens=12, seed=7, shard_tokens=40)
    replace, calls = os.replace, []

    def full(source, target):
        calls.append(target)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*run the same command"):
        generate_replies(llm, PROMPTS, tmp_path, small)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.safetensors"]
    assert generate_replies(llm, PROMPTS, tmp_path, small)["conversations"] == 12


def test_what_cannot_be_done_is_said_in_a_sentence(llm, whole, tmp_path):
    with pytest.raises(ConfigError, match="there are no prompts"):
        generate_replies(llm, [], tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match="give num_tokens or seconds"):
        generate_replies(llm, None, tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match="max_tokens=12 and 13"):
        generate_replies(llm, PROMPTS, whole[0], ReplySettings(max_tokens=13, seed=7))
    with pytest.raises(ConfigError, match="rank=2"):
        generate_replies(llm, PROMPTS, tmp_path, SETTINGS, rank=2, world=2)
    (tmp_path / "shard-00000.safetensors").write_text("nothing")
    with pytest.raises(ConfigError, match="is no shard of replies"):
        generate_replies(llm, PROMPTS, tmp_path, SETTINGS)
    for settings in ({"num_tokens": 0}, {"follow_up": 2.0}, {"temperatures": ()}, {"temperatures": ((0.5, 0.0),)}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            ReplySettings(**settings)
