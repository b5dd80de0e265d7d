"""One start, in a process of its own: `python -m outrider.measure.start_run JOB.json` writes JOB.out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def run(file: Path) -> None:
    """Open the job's model and answer its prompt with one token; seconds by part, counted from the job's own time."""
    job = json.loads(file.read_text())
    from outrider import LLM, SamplingParams

    parts = {"Python and imports": time.time() - job["began"]}
    llm = LLM(job["model"], **job["settings"])
    parts |= llm.resolved.start
    began = time.perf_counter()
    llm.generate(job["prompt"], SamplingParams(max_tokens=1, seed=0))
    parts["first token"] = time.perf_counter() - began
    file.with_suffix(".out").write_text(json.dumps({"seconds": time.time() - job["began"], "parts": parts}))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
