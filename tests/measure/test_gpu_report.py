"""The report of one run on one device, whole, on a tiny model and its widened twin on a CPU; and each of its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.cli import main
from outrider.errors import CapacityError, ConfigError
from outrider.measure import passes, peers, vllm_peer
from outrider.measure.bandwidth import measure_bandwidth
from outrider.measure.cycle import Cycle, Decoding, TimedEngine, answer
from outrider.measure.gpu_report import Reporter, Scope
from outrider.measure.page import page
from outrider.measure.passes import measure_passes, streamed_bytes
from outrider.measure.report_page import markdown, sections
from outrider.measure.report_rows import LAWS
from outrider.measure.synthetic import NOT_VALID, measure_synthetic
from outrider.measure.twin import compare
from tests import artefacts
from tests.models.tiny import make_module, make_target, make_tokenizer

ROOT = Path(__file__).parents[2]
PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5), tuple(range(10, 30))]
SCOPE = Scope(
    drafters=("ngram", "eagle3", "medusa"),
    prompts=PROMPTS,
    max_tokens=12,
    together=(1, 2),
    context=16,
    widths=(1, 3, 40),
    batches=(2, 4),
    repeats=2,
    tau=2.5,
    depth=3,
    buffer=2**20,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    make_module("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def opened(folder: str, **own: Any) -> LLM:
    settings: dict[str, Any] = {"num_slots": 1024, "self_test": False, "threads": 1, "drafter": "none", **own}
    if settings["drafter"] == "eagle3":
        settings["drafter_model"] = artefacts.folder("eagle3", make_target(make_module("llama")))
    return LLM(folder, **settings)


@pytest.fixture(scope="module")
def report(folder) -> dict[str, Any]:
    return Reporter(lambda own: opened(folder, **{"widen": "2x", **own}), SCOPE).run()


def test_a_report_holds_every_part(report):
    json.dumps(report, allow_nan=False)
    assert report["device"] == "CPU"
    assert report["limit"]["bytes_per_second"] > 0
    assert [(p["requests"], p["rows"]) for p in report["passes"]] == [(1, 1), (1, 3), (1, 40), (2, 1), (4, 1)]
    assert {(r["law"], r["together"]) for r in report["plain"]} == {(law, count) for law in LAWS for count in (1, 2)}
    for row in report["plain"]:
        assert row["cycle"] == pytest.approx(row["target"] + row["draft"] + row["rest"])
        assert row["tau"] == 1
        assert row["draft"] == 0
        assert row["share_of_limit"] > 0


def test_speculative_rows_say_the_same_texts_and_synthetic_ones_say_they_are_not_valid(report):
    rows = [row for row in report["speculative"] if "error" not in row]
    true, invented = [r for r in rows if not r["synthetic"]], [r for r in rows if r["synthetic"]]
    assert [r["drafter"] for r in true] == ["ngram"] * 6 + ["eagle3"] * 6
    assert [r["differing_texts"] for r in true] == [0] * 12
    assert [(r["drafter"], r["together"], r["synthetic"]) for r in invented] == [
        ("eagle3", 1, NOT_VALID),
        ("eagle3", 2, NOT_VALID),
    ]
    assert all("differing_texts" not in r for r in invented)
    assert all(r["level"] > 0 and r["drafter_bytes"] > 0 for r in invented)
    assert all(r["bound"] > 0 for r in rows if r["together"] == 1)


def test_a_drafter_that_cannot_be_built_is_told_of_in_its_row(report):
    (row,) = [row for row in report["speculative"] if "error" in row]
    assert row["drafter"] == "medusa"
    assert "no medusa drafter" in row["error"]


def test_the_report_tells_that_it_is_a_twin_and_how_like_its_original(report):
    twin = report["twin"]
    assert twin["plan"] == "2x"
    assert (twin["texts"], twin["differing"], twin["tokens_alike"]) == (9, 0, 1.0)
    assert "widened" in report["resolved"]["model"]


def test_others_run_on_the_twins_own_weights(report):
    names = [peer["name"] for peer in report["peers"]]
    assert names == [f"Transformers, {way}" for way in ("plain", "prompt lookup 5", "static cache, torch.compile")]
    assert all(peer["error"] or peer["tokens"] == 12 * len(PROMPTS) for peer in report["peers"])
    assert report["peers"][0]["error"] is None


def test_the_page_shows_it_all_and_marks_what_is_not_valid(report):
    text = markdown(report)
    assert "Widened twin of" in text
    assert "medusa: no medusa drafter" in text
    table = text[text.index("## Speculative decoding") :].split("\n## ")[0]
    assert table.count(f"eagle3, {NOT_VALID}") == 2
    lines = [line for line in table.splitlines() if line.startswith("| eagle3,")]
    assert all(NOT_VALID in line for line in lines)
    shown = page("a report", sections(report))
    assert shown.count("<svg ") == shown.count("<figcaption>") == 2
    assert "rows of one request: read limit" in shown


def test_prompts_that_do_not_fit_are_refused_at_once(folder):
    with pytest.raises(ConfigError, match="the longest prompt has 90 tokens"):
        Reporter(lambda own: opened(folder, **own), Scope(("ngram",), [tuple(range(3, 93))], peers=False)).run()


def test_the_command_writes_the_report(folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w5 w6 w7"}\n')
    words = f"report {folder} --out {tmp_path / 'out'} --prompts {prompts} --drafter ngram --max-tokens 8 --tau 0"
    words += " --context 16 --num-slots 512 --no-self-test --no-peers --no-starts --json --law T=0"
    words += " --only speculative"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["starts"], found["random"]) == ([], [])
    assert found == json.loads((tmp_path / "out" / "report.json").read_text())
    assert (tmp_path / "out" / "report.md").read_text().startswith("# ")
    assert (tmp_path / "out" / "report.html").read_text().count("<svg ") == 2
    assert [entry["part"] for entry in found["elapsed"]][-2:] == ["loading, drafter ngram", "ngram, T=0, 1 at once"]
    assert main([*words.split(), "--only", "nothing"]) == 2
    assert main([*words.split(), "--no-adaptive"]) == 2
    assert main([*words.split(), "--vllm", "{"]) == 2


def test_synthetic_acceptance_has_the_wanted_mean_and_leaves_the_engine_as_it_was(folder):
    llm = opened(folder, drafter="eagle3", prefix_cache=False)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    before = [result.token_ids for result in llm.generate(PROMPTS, params)]
    found = measure_synthetic(llm.engine, PROMPTS * 2, 2.5, 40, depth=3)
    assert found.tau == pytest.approx(2.5, abs=0.3)
    assert found.levels == pytest.approx(3, abs=0.3)
    assert found.draft > 0
    assert [result.token_ids for result in llm.generate(PROMPTS, params)] == before


@pytest.mark.parametrize("tau", [0.5, 4.5])
def test_a_mean_out_of_reach_is_refused(folder, tau):
    with pytest.raises(ConfigError, match="cannot be reached by trees of 3 levels"):
        measure_synthetic(opened(folder, drafter="eagle3").engine, PROMPTS, tau, 8, depth=3)


def test_timed_cycles_hold_the_engines_own_texts_and_no_prompts(folder):
    llm = opened(folder, prefix_cache=False)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [list(result.token_ids) for result in llm.generate(PROMPTS, params)]
    engine = TimedEngine(llm.engine)
    assert [request.output for request in answer(engine, PROMPTS, params)] == expected
    cycles = engine.cycles()
    assert len(cycles) == 11 * len(PROMPTS)  # the first token of each comes with its prompt
    assert engine.cycles() == []
    assert all(0 < cycle.target < cycle.seconds and cycle.rest > 0 for cycle in cycles)


def test_decoding_is_a_quotient_of_sums():
    cycles = [Cycle(4, 1, 3, 3, 3, 0.5, 0.3, 0.1), Cycle(1, 1, 1, 0, 0, 0.1, 0.09, 0.0)]
    found = Decoding.of(cycles, lambda rows: rows / 10)
    assert found.tokens_per_second == pytest.approx(4 / 0.6)
    assert found.tau == 2
    assert found.alone == pytest.approx(0.25)
    assert found.rest == pytest.approx((0.1 + 0.01) / 2)
    with pytest.raises(ConfigError, match="nothing was decoded"):
        Decoding.of([])


def test_a_pass_streams_its_weights_without_an_embedding_that_is_only_looked_up(folder):
    tied, untied = (make_module("llama", tie_word_embeddings=is_tied) for is_tied in (True, False))
    counts = [sum(p.nbytes for p in module.parameters()) for module in (tied, untied)]
    table = untied.get_input_embeddings().weight.nbytes
    assert streamed_bytes(make_target(tied)) == counts[0]
    assert streamed_bytes(make_target(untied)) == counts[1] - table
    norms = sum(p.nbytes for p in untied.parameters() if p.dim() == 1)
    assert streamed_bytes(opened(folder).engine.target) == counts[1] - table - norms  # the lean way counts no vectors


def test_passes_too_large_for_memory_are_left_out_with_a_note(folder, monkeypatch):
    target = opened(folder).engine.target
    monkeypatch.setattr(passes, "free_memory", lambda device: 200 * 2**10)
    found, notes = measure_passes(target, [(1, 1), (64, 1)], 16, 1)
    assert [(p.requests, p.rows) for p in found] == [(1, 1)]
    assert notes == ["64 requests of 1 rows: more keys than memory holds"]
    monkeypatch.setattr(passes, "free_memory", lambda device: 10)
    with pytest.raises(CapacityError, match="no pass fits"):
        measure_passes(target, [(1, 1)], 16, 1)


def test_the_read_kernel_reads_everything():
    pytest.importorskip("triton")
    from outrider.measure.read_kernel import read

    out = torch.empty(3, dtype=torch.int32)
    read(torch.arange(10_000, dtype=torch.int32), out, 512, 8, 4)
    assert out.tolist() == [sum(range(0, 4096)), sum(range(4096, 8192)), sum(range(8192, 10_000))]
    assert measure_bandwidth(torch.device("cpu"), 2**20, 2).bytes_per_second > 0


def test_the_read_kernel_compiles_for_a_hopper_gpu():
    pytest.importorskip("triton")
    program = (
        "import torch\n"
        "from tests.kernels.hopper import compile_and_tell\n"
        "compile_and_tell()\n"
        "from outrider.measure.read_kernel import SHAPES, read\n"
        "for block, rounds, warps in SHAPES:\n"
        "    buffer, out = (torch.empty(size, dtype=torch.int32, device='meta') for size in (2**29, 2**14))\n"
        "    read(buffer, out, block, rounds, warps)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["_read"] * 4


def test_a_twin_that_says_something_else_is_found_out(folder, tmp_path):
    make_module("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    found = compare(lambda: opened(folder), lambda: opened(str(tmp_path), widen="2x"), PROMPTS, [greedy])
    assert found.differing == len(PROMPTS)
    assert found.tokens_alike < 0.5
    assert len(found.margins) == len(PROMPTS)


def work(tau: float | None) -> vllm_peer.VllmWork:
    return vllm_peer.VllmWork(make_module("llama").config, PROMPTS, 4, tau, 3, {})


def test_a_peer_that_fails_or_is_not_there_is_told_of(monkeypatch):
    module = make_module("llama")
    monkeypatch.setattr(module, "generate", lambda **given: 1 / 0)
    assert [peer.error for peer in peers.transformers_peers(module, PROMPTS, 4, str)] == ["division by zero"] * 3
    monkeypatch.setattr(vllm_peer.importlib.util, "find_spec", lambda name: None)
    (found,) = vllm_peer.vllm_peers(work(2.5), (1, 8), torch.device("cpu"), str)
    assert found.error == "vLLM is not installed here"


def test_a_peer_is_ready_for_its_longest_prompt_before_it_is_timed(monkeypatch):
    module, asked = make_module("llama"), []

    def generate(input_ids, max_new_tokens, **given):
        asked.append((input_ids.shape[1], max_new_tokens))
        return torch.zeros(1, input_ids.shape[1] + max_new_tokens)

    monkeypatch.setattr(module, "generate", generate)
    prompts = [(1, 2), (1, 2, 3, 4), (1, 2, 3)]
    assert [peer.tokens for peer in peers.transformers_peers(module, prompts, 5, str)] == [15] * 3
    timed = [(len(prompt), tokens) for tokens in (5, 1) for prompt in prompts]
    assert asked == [(4, 5), (2, 5), *timed] * 3


def test_what_a_peer_decodes_is_told_without_its_reading():
    found = peers.Peer.of("one", (40, 2.5), (4, 0.5))
    assert (found.tokens_per_second, found.decoding) == (16, 18)
    assert peers.Peer.of("noise", (40, 2.5), (4, 2.6)).decoding is None


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("class SamplingParams:\n    def __init__(self, **k): pass\nclass LLM:\n    def __init__(self, **k):\n"
         "        raise ValueError('no GPU')\n", "ValueError: no GPU"),
        ("class Out:\n    def __init__(self, n):\n        self.outputs = [type('O', (), {'token_ids': [0] * n})]\n"
         "class SamplingParams:\n    def __init__(self, **k): self.n = k['max_tokens']\n"
         "class LLM:\n    def __init__(self, **k):\n"
         "        assert k.get('speculative_config', k)['model'][-5:] in ('/head', 'model')\n"
         "    def generate(self, given, asked, use_tqdm): return [Out(asked.n) for _ in given]\n", None),
    ],
)  # fmt: skip
def test_vllm_runs_in_a_process_of_its_own(tmp_path, monkeypatch, body, error):
    (tmp_path / "vllm.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(peers.__file__).parents[2]}")
    found = list(vllm_peer.vllm_peers(work(2.5), (2,), torch.device("cpu"), str))
    assert [peer.error for peer in found] == [error] * 2
    assert [peer.tokens for peer in found] == [0 if error else 4 * len(PROMPTS)] * 2
    assert ["not valid" in peer.name for peer in found] == [False, True]
