"""The border of the command line: start-up, exit codes, and one sentence instead of a traceback."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import outrider
from outrider.cli.app import app
from outrider.cli.reference import reference
from outrider.errors import ModelError

ROOT = Path(__file__).parents[2]


def test_help_starts_fast_and_without_torch():
    code = "import sys; from outrider.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    for _ in range(8):  # other processes on the same core cost seconds, too: one quiet start is enough
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        if seconds < 0.5:
            break
    assert seconds < 0.5


def test_no_words_show_the_help(run):
    ran = run()
    assert ran.code == 0
    for verb in ("demo", "fetch", "generate", "chat", "check", "doctor"):
        assert verb in ran.out


def test_version(run):
    assert run("--version").out == f"{outrider.__version__}\n"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["genrate", "m", "p"], "genrate"),
        (["generate", "m"], "PROMPT"),
        (["generate", "m", "p", "--temperatur", "1"], "--temperatur"),
        (["generate", "m", "p", "--top-k", "many"], "--top-k"),
        (["generate", "m", "p", "--drafter", "ngrma"], "did you mean 'ngram'"),
        (["generate", "m", "p", "--dtype", "int3"], "dtype='int3'"),
        (["generate", "m", "p", "--depth", "-1"], "depth=-1"),
        (["generate", "m", "p", "--temperature", "nan"], "temperature=nan"),
        (["generate", "m", "p", "--logit-bias", "7:1"], "ID=VALUE"),
        (["generate", "m", "p", "--logprobs-mode", "cooked"], "cooked"),
        (["generate", "m", ""], "the prompt is empty"),
        (["generate", "m", "\udcff"], "not UTF-8"),
        (["check", "m", "--limit", "0"], "limit=0"),
        (["check", "m", "--temperature", "-1"], "temperature=-1"),
        (["check", "m", "--max-tokens", "0"], "max_tokens=0"),
        (["check", "m", "--drafter", "best"], "unknown drafter 'best'"),
        (["generate", "m", "p", "--drafter", "ngram+ngram+ngram"], "joins two"),
        (["bench", "m", "--drafter", "ngram,best"], "unknown drafter 'best'"),
        (["bench", "m", "--drafter", "all", "--only", "sped"], "did you mean 'speed'?"),
        (["bench", "m", "--only", "speed"], "--drafter all"),
        (["check", "m", "--prompts", "no/such.jsonl"], "no/such.jsonl"),
        (["check", "m", "--acceptance", "rejection"], "--temperature 0"),
        (["chat", "m", "--n", "2"], "n=2"),
        (["fetch", "no-such-alias"], "no-such-alias"),
    ],
)
@pytest.mark.usefixtures("engines")
def test_mistakes_are_one_sentence(run, words, part):
    ran = run(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("outrider: ")
    assert ran.err.count("\n") == 1
    assert part in ran.err


def test_with_json_a_refusal_is_an_object_too(run, engines):
    ran = run("generate", "m", "p", "--top-k", "-1", "--json")
    assert ran.code == 2
    assert "top_k=-1" in json.loads(ran.out.splitlines()[-1])["error"]
    assert engines == []  # refused before anything was loaded


def test_an_error_of_the_engine_is_one_sentence(run, monkeypatch):
    def refuse(model, **settings):
        raise ModelError(f"{model} is an encoder: choose a decoder-only model")

    monkeypatch.setitem(vars(outrider), "LLM", refuse)
    ran = run("generate", "bert", "p")
    assert (ran.code, ran.err) == (2, "outrider: bert is an encoder: choose a decoder-only model\n")


def test_interrupt_exits_130(run, engines, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.generate.stream", interrupted)
    ran = run("generate", "m", "p")
    assert (ran.code, ran.err) == (130, "")
    assert engines[0].closed


def test_a_reader_that_leaves_is_no_traceback():
    code = (
        "import sys; from outrider import cli; from outrider.cli import app, main\n"
        "app.app.command('flood')(lambda: [sys.stdout.write('x' * 1000) for _ in range(10000)])\n"
        "sys.exit(main(['flood']))"
    )
    shell = f'"{sys.executable}" -c "$CODE" | head -c 10; echo " ${{PIPESTATUS[0]}}"'
    env = {**os.environ, "CODE": code}
    ran = subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == "xxxxxxxxxx 141\n"
    assert ran.stderr == ""


CLOSED = [
    (["generate", "m", "-"], "<&-", 2),
    (["generate", "m", "p", "--bogus"], "2>&-", 2),
    (["generate", "m", "p", "--bogus", "--json"], ">&-", 2),
    (["--version"], ">&-", 0),
]


@pytest.mark.parametrize(("words", "closed", "code"), CLOSED)
def test_a_closed_stream_leads_nowhere(words, closed, code):
    shell = f'"{sys.executable}" -m outrider {" ".join(words)} {closed}'
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (ran.returncode, "Traceback" in ran.stderr) == (code, False)


def test_output_that_cannot_be_written_is_one_sentence():
    code = (
        "import sys; from outrider import cli; from outrider.cli import app, main\n"
        "def full(): raise OSError(28, 'No space left on device')\n"
        "app.app.command('full')(full)\n"
        "sys.exit(main(['full']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith("outrider: the system refused ([Errno 28] No space left on device)")
    assert ran.stderr.count("\n") == 1


def test_a_chat_with_bytes_that_are_no_text_is_refused():
    code = "from outrider.cli import _prepare_streams, chat; _prepare_streams(); chat._read()"
    env = {**os.environ, "LC_ALL": "C"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, input=b"\xff\n", capture_output=True)
    assert b"standard input is not UTF-8 text" in ran.stderr


def test_reference_page_is_current():
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), "run `make docs`"


def test_every_verb_has_one_file():
    verbs = typer.main.get_command(app).commands
    assert set(verbs) <= {path.stem for path in (ROOT / "src" / "outrider" / "cli").glob("*.py")}
