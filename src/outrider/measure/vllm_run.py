"""One job for vLLM, in a process of its own: `python -m outrider.measure.vllm_run JOB.json` writes JOB.out."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path


def run(file: Path) -> None:
    """Answer the job's prompts greedily, so many at a time, after the first wave once untimed."""
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
    asked = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    waves = [
        job["prompts"][start : start + job["together"]] for start in range(0, len(job["prompts"]), job["together"])
    ]

    def answer(wave: list[list[int]]) -> int:
        given = [{"prompt_token_ids": prompt} for prompt in wave]
        return sum(len(out.outputs[0].token_ids) for out in llm.generate(given, asked, use_tqdm=False))

    answer(waves[0])
    started = time.perf_counter()
    tokens = sum(answer(wave) for wave in waves)
    seconds = time.perf_counter() - started
    file.with_suffix(".out").write_text(json.dumps({"tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
