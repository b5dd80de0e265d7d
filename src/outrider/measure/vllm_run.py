"""One job for vLLM, in a process of its own: `python -m outrider.measure.vllm_run JOB.json` writes JOB.out."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path


def run(file: Path) -> None:
    """Answer the job's prompts greedily, so many at a time, in full and with one token each; one wave once before."""
    job = json.loads(file.read_text())
    vllm = importlib.import_module("vllm")
    keywords = {} if job["speculative"] is None else {"speculative_config": job["speculative"]}
    longest = max(map(len, job["prompts"])) + job["max_tokens"] + 64
    llm = vllm.LLM(
        model=job["model"],
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=max(8, job["together"]),
        gpu_memory_utilization=job["share"],
        **keywords,
        **job["options"],
    )
    waves = [
        job["prompts"][start : start + job["together"]] for start in range(0, len(job["prompts"]), job["together"])
    ]

    def answer(waves: list[list[list[int]]], max_tokens: int) -> tuple[int, float]:
        asked = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        started, tokens = time.perf_counter(), 0
        for wave in waves:
            given = [{"prompt_token_ids": prompt} for prompt in wave]
            tokens += sum(len(out.outputs[0].token_ids) for out in llm.generate(given, asked, use_tqdm=False))
        return tokens, time.perf_counter() - started

    answer(waves[:1], job["max_tokens"])
    found = {"whole": answer(waves, job["max_tokens"]), "first": answer(waves, 1)}
    file.with_suffix(".out").write_text(json.dumps(found))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
