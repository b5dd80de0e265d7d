"""Shards become batches that hold every conversation once, point at its reply, and waste little on padding."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.errors import TrainingError
from outrider.training import vocabulary
from outrider.training.corpus import Corpus


def write(folder, conversations, name="shard-00000"):
    """(ids, where the reply begins) pairs as one shard."""
    folder.mkdir(exist_ok=True)
    save_file(
        {
            "tokens": np.concatenate([ids for ids, _ in conversations]).astype(np.int32),
            "starts": np.cumsum([0, *(len(ids) for ids, _ in conversations)]).astype(np.int64),
            "replies": np.array([reply for _, reply in conversations], dtype=np.int64),
        },
        folder / f"{name}.safetensors",
    )


def random_conversations(count, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        reply = int(rng.integers(1, 30))
        ids = rng.integers(3, 90, size=reply + int(rng.integers(1, 90)))
        ids[0] = 100 + number  # names the conversation
        made.append((ids, reply))
    return made


@pytest.fixture
def corpus(tmp_path):
    conversations = random_conversations(300)
    write(tmp_path, conversations[:200])
    write(tmp_path, conversations[200:], "shard-00001")
    return Corpus.read(tmp_path), conversations


def test_every_conversation_is_in_one_batch_with_its_reply(corpus):
    whole, conversations = corpus
    seen = []
    for batch in whole.batches(1024, seed=3):
        assert batch.tokens.numel() <= 1024
        width = batch.tokens.shape[1]
        predicted = [[] for _ in batch.tokens]
        for row, offset in zip(batch.rows.tolist(), batch.offsets.tolist(), strict=True):
            b, t = divmod(row, width)
            assert offset == len(predicted[b])
            predicted[b].append(batch.tokens[b, t + 1].item())
        firsts = 0
        for b, tokens in enumerate(batch.tokens):
            number = tokens[0].item() - 100
            ids, reply = conversations[number]
            assert tokens[: batch.lengths[b]].tolist() == ids.tolist()
            assert predicted[b] == ids[reply:].tolist()
            assert batch.replies[b] == reply
            assert batch.firsts[b] == firsts
            firsts += len(predicted[b])
            seen.append(number)
    assert sorted(seen) == list(range(300))


def test_little_is_padding(corpus):
    whole, _ = corpus
    batches = list(whole.batches(1024, seed=0))
    used, room = sum(b.num_tokens for b in batches), sum(b.tokens.numel() for b in batches)
    assert used / room > 0.7  # lengths of 2 to 120 are padded to multiples of 32


def test_a_seed_is_an_order_and_a_place_in_it_can_be_found_again(corpus):
    whole, _ = corpus

    def texts(*args):
        return [batch.tokens.tolist() for batch in whole.batches(512, *args)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert texts(1, 5) == texts(1)[5:]
    shares = [texts(1, rank, 3) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    whole_pass = texts(1)
    assert all(shares[index % 3][index // 3] == text for index, text in enumerate(whole_pass))


def test_replies_to_one_prompt_stay_on_one_side(tmp_path):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, size=8) for _ in range(60)]
    write(tmp_path, [(np.concatenate([p, rng.integers(3, 90, size=9)]), 8) for p in prompts for _ in range(3)])
    training, held_out = Corpus.read(tmp_path).split(0.2)

    def texts(part):
        return {tuple(part.tokens[s : s + 8]) for s in part.starts}

    assert len(training) + len(held_out) == 180
    assert not texts(training) & texts(held_out)
    assert 3 <= len(held_out) <= 80


def test_long_conversations_are_cut_and_those_without_a_reply_left_out(tmp_path):
    write(tmp_path, [(np.arange(3, 60), 10), (np.arange(3, 60), 50), (np.arange(3, 13), 10)])
    whole = Corpus.read(tmp_path, max_length=40)
    assert whole.lengths.tolist() == [40]
    assert whole.count(64).tolist() == [int(13 <= token < 43) for token in range(64)]


def test_bad_folders_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(TrainingError, match="no shards"):
        Corpus.read(tmp_path)
    (tmp_path / "shard-00000.safetensors").write_bytes(b"cut short")
    with pytest.raises(TrainingError, match="not a whole shard"):
        Corpus.read(tmp_path)
    write(tmp_path, [(np.arange(3, 9), 6)])
    with pytest.raises(TrainingError, match="no reply"):
        Corpus.read(tmp_path)
    write(tmp_path, [(np.arange(3, 9), 2)])
    with pytest.raises(TrainingError, match="too few"):
        Corpus.read(tmp_path).split()


def test_the_most_frequent_ids_are_kept_with_those_that_end_a_text(tmp_path):
    replies = [5] * 6 + [9] * 4 + [7] * 4 + [3] * 2 + [8]
    write(tmp_path, [(np.array([8, 8, 8, *replies]), 3)])
    chosen = vocabulary.choose(Corpus.read(tmp_path), 3, vocab_size=12, eos_ids=[2])
    assert chosen.kept_ids.tolist() == [2, 5, 7]  # 7 and 9 tie, the lower id stays; the prompt's 8 do not count
    assert chosen.coverage == pytest.approx(10 / 17)
    with pytest.raises(TrainingError, match="made them"):
        vocabulary.choose(Corpus.read(tmp_path), 3, vocab_size=8)
