"""DFlash's form of a block as it is trained, exported and served: what DFlash's published code says at every place."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider.errors import ConfigError, ModelError
from outrider.export.folder import export
from outrider.models.heads import files
from outrider.registry import TRAINED
from outrider.training.block import drawn
from outrider.training.harvest import Harvester
from outrider.training.parallel import Parallel
from tests import foreign_heads as theirs
from tests.drafters import test_heads as served
from tests.models.test_foreign_heads import World
from tests.models.tiny import make_tokenizer
from tests.training.test_heads import Watcher, make_batch

KEPT = torch.tensor([token for token in range(served.VOCAB) if token % 5])


def shaken(module):
    """A fresh one, far from where training begins."""
    made = TRAINED["block"].initialise(module, KEPT, block_size=4, num_layers=2, num_anchors=3, plain=1)
    assert isinstance(made, Parallel)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5))
            parameter.copy_(parameter.bfloat16())
    return made


@pytest.fixture
def written(tmp_path):
    """A target on disk, the module, and the folders of its artefact and of its export."""
    module = served.module()
    module.save_pretrained(tmp_path / "target")
    make_tokenizer(served.VOCAB).save_pretrained(tmp_path / "target")
    made = shaken(module)
    target = files.describe_target(served.make_target(module, make_tokenizer(served.VOCAB)))
    files.write(tmp_path / "ours", {"drafter": "block", "target": target, **made.settings()}, made.tensors(), {}, "")
    export(str(tmp_path / "ours"), str(tmp_path / "target"), tmp_path / "there", "vllm", None, None)
    return made, tmp_path


@torch.no_grad()
def test_it_is_trained_as_their_code_drafts(written):
    made, folder = written
    module, world = served.module(), World()
    batch = make_batch()
    batch = replace(batch, tokens=batch.tokens % served.VOCAB)
    arithmetic = Watcher()
    made.loss(batch, Harvester(module, KEPT, made.taps, served.VOCAB, arithmetic)(batch))
    (seen,) = arithmetic.seen
    rows = seen.view(len(batch.tokens), made.num_anchors, made.num_levels, -1)
    compared = 0
    for b, offsets in enumerate(drawn(batch, made.num_anchors).tolist()):
        for a, offset in enumerate(offsets):
            known = batch.tokens[b, : int(batch.replies[b]) + offset].tolist()
            for level in range(made.num_levels):
                expected = world.law("block", folder / "there", known, [0] * level, range(0))
                torch.testing.assert_close(rows[b, a, level].double(), expected[KEPT], atol=2e-2, rtol=2e-2)
                compared += 1
    assert compared >= 18


def test_it_is_served_as_their_code_drafts(written, monkeypatch):
    _, folder = written
    world = World()
    engine = served.build("block", served.target("native", monkeypatch), str(folder / "ours"), max_rows=7)
    watching = served.Watched(engine.drafter)
    served.serve(engine, served.texts(2))
    for request, known, path, logits, _ in random.Random(1).sample(watching.laws, 20):
        expected = world.law("block", folder / "there", known, path, watching.blind[request.id])
        # Output rows are exported in bfloat16, and the target's own here.
        torch.testing.assert_close(logits.double(), expected[KEPT], atol=2e-2, rtol=2e-2)


def test_what_it_has_not_is_refused(written, monkeypatch):
    made, folder = written
    with pytest.raises(ConfigError, match="unknown setting 'markov_rank'"):
        TRAINED["block"].initialise(served.module(), KEPT, plain=1, markov_rank=4)
    assert theirs.read(folder / "there")[0]["block_size"] == made.num_levels + 1
    from outrider.models.heads import widen

    target = served.target("lean", monkeypatch)
    target.original = object()
    with pytest.raises(ModelError, match="of the plain form is not widened"):
        widen.widened(files.read(folder / "ours"), target)
