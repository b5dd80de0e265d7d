"""`outrider train` under `torchrun` on CPUs: the processes share the replies and the batches, and one of them tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

import outrider
from tests.models.tiny import make_tokenizer
from tests.training import grammar

WORDS = ["--reply-tokens", "24000", "--steps", "6", "--batch-tokens", "512", "--vocabulary", "48", "--held-out", "0.1"]


@pytest.mark.slow
def test_two_processes_make_one_drafter(taught, tmp_path):
    tokenizer = make_tokenizer(grammar.VOCAB)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    taught.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    rows = np.random.default_rng(1).integers(3, grammar.VOCAB, size=(200, grammar.PROMPT))
    lines = (json.dumps({"prompt": " ".join(f"w{token}" for token in row)}) for row in rows)
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "outrider"),
            *("train", "small_model", "--target", "target", "--prompts", "prompts.jsonl", "--out", "made", *WORDS),
            *("--shape", "num_layers=2", "--json"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(outrider.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    (told,) = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    assert told["figures"]["check"]["differing"] == 0
    assert told == json.loads((tmp_path / "made" / "provenance.json").read_text())
    assert len(list((tmp_path / "made.work" / "corpus").glob("shard-*"))) == 2  # at least one of each process
    # Two shares of six batches: more than one process alone can have seen.
    assert told["training"]["tokens"] > 6 * 512
