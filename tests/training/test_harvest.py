"""What is harvested equals what Transformers itself says of each conversation alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.training.corpus import Batch, Corpus
from outrider.training.harvest import Harvester
from outrider.training.losses import Arithmetic
from tests.models.tiny import VOCAB, make_module

KEPT = torch.tensor([1, 4, 5, 9, 40, 41, 77, 90])


def make_batch(lengths=(19, 40, 33), replies=(4, 11, 20), seed=0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, VOCAB, size=sum(lengths)).astype(np.int32)
    starts = np.cumsum([0, *lengths[:-1]])
    corpus = Corpus(tokens, starts, np.array(lengths), np.array(replies))
    (batch,) = corpus.batches(4096, seed)
    return batch


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "granite", "cohere", "gpt2", "gpt_neox", "mistral"])
def test_taps_and_laws_are_the_modules_own(name):
    module = make_module(name)
    batch = make_batch()
    harvest = Harvester(module, KEPT, (0, 2), VOCAB, Arithmetic(chunk=16))
    features = harvest(batch)
    firsts = batch.firsts.tolist()
    for b, length in enumerate(batch.lengths.tolist()):
        reply, first = int(batch.replies[b]), firsts[b]
        with torch.no_grad():
            alone = module(input_ids=batch.tokens[b : b + 1, :length], output_hidden_states=True)
        torch.testing.assert_close(features.taps[0][b, :length], alone.hidden_states[1][0], rtol=1e-4, atol=1e-4)
        logits = alone.logits[0, reply - 1 : length - 1]
        rows = slice(first, first + len(logits))
        torch.testing.assert_close(features.law.logits[rows], logits[:, KEPT], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features.law.log_z[rows], logits.logsumexp(dim=-1), rtol=1e-4, atol=1e-4)
        tops = [KEPT.tolist().index(top) if top in KEPT else -1 for top in logits.argmax(dim=-1).tolist()]
        assert features.law.top[rows].tolist() == tops
    assert len(features.law.top) == len(batch.rows)


def test_ids_of_a_padded_embedding_have_no_mass():
    module = make_module("llama")
    batch = make_batch()
    cut = Harvester(module, KEPT, (), 100, Arithmetic(chunk=64))(batch)
    whole = Harvester(module, KEPT, (), VOCAB, Arithmetic(chunk=64))(batch)
    assert (cut.law.log_z < whole.law.log_z).all()


def test_the_target_is_frozen():
    module = make_module("llama")
    Harvester(module, KEPT, (1,), VOCAB)(make_batch())
    assert not any(parameter.requires_grad for parameter in module.parameters())
