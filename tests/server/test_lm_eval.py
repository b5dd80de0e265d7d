"""`lm_eval` through our server, offline, on prompts at hand: it reads the scores and texts that the engine gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import SamplingParams
from tests.server.conftest import NAME, Live

ASKED = [f"abc the {number} {word}" for number in range(6) for word in ("ab", "er", "é")]
CHOICES = [" the ab", " er", " é abc"]
STOP = "a"
TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


def scored(served: Live, prompt: str, choice: str) -> float:
    """Log-probability of a choice, by the engine."""
    whole, head = (served.llm.encode(text, raw=True) for text in (prompt + choice, prompt))
    (result,) = served.llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0), raw=True)
    return sum(row.logprob for row in result.prompt_logprobs[len(head) :])


def evaluate(served: Live, kind: str, folder: str, tmp_path: Path, docs: list[dict[str, Any]], **task: Any) -> dict:
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is heavy, and in no extra: pip install 'lm_eval[api]'")
    file = tmp_path / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    config = {
        "task": "at_hand",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{ask}}",
        **task,
    }
    route = {"local-completions": "completions", "local-chat-completions": "chat/completions"}[kind]
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args={
            "model": NAME,
            "base_url": f"{served.url}/v1/{route}",
            "tokenizer": folder,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "max_length": 512,
        },
        tasks=[config],
        apply_chat_template=kind == "local-chat-completions",
        bootstrap_iters=0,
        log_samples=True,
    )
    served.settle()
    return found


@pytest.mark.slow
def test_choices_are_scored_as_the_engine_scores_them(served, folder, tmp_path) -> None:
    scores = [[scored(served, ask, choice) for choice in CHOICES] for ask in ASKED]
    best = [row.index(max(row)) for row in scores]
    golds = [number % len(CHOICES) for number in range(len(ASKED))]
    docs = [{"ask": ask, "choices": CHOICES, "gold": gold} for ask, gold in zip(ASKED, golds, strict=True)]
    shape = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
    found = evaluate(
        served,
        "local-completions",
        folder,
        tmp_path,
        docs,
        **shape,
        target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )
    num_right = sum(one == gold for one, gold in zip(best, golds, strict=True))
    assert 0 < num_right < len(ASKED)
    assert found["results"]["at_hand"]["acc,none"] == num_right / len(ASKED)
    samples = {sample["doc"]["ask"]: sample for sample in found["samples"]["at_hand"]}
    for ask, row in zip(ASKED, scores, strict=True):
        said = [float(answer[0][0]) for answer in samples[ask]["resps"]]
        assert said == pytest.approx(row, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_texts_are_the_engines_own(served, folder, tmp_path, kind) -> None:
    params = SamplingParams(max_tokens=TOKENS, stop=(STOP,), speculation=False)
    is_chat = kind == "local-chat-completions"
    prompts = [[{"role": "user", "content": ask}] for ask in ASKED] if is_chat else ASKED
    texts = [result.text for result in served.llm.generate(prompts, params, raw=not is_chat)]
    docs = [{"ask": ask, "says": text} for ask, text in zip(ASKED, texts, strict=True)]
    found = evaluate(
        served,
        kind,
        folder,
        tmp_path,
        docs,
        output_type="generate_until",
        doc_to_target="{{says}}",
        generation_kwargs={"until": [STOP], "max_gen_toks": TOKENS, "temperature": 0.0, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )
    assert len(set(texts)) > 3
    said = {sample["doc"]["ask"]: sample["resps"][0][0] for sample in found["samples"]["at_hand"]}
    assert said == dict(zip(ASKED, texts, strict=True))
    assert found["results"]["at_hand"]["exact_match,none"] == 1.0
