"""Prompt files of several shapes are read, and a bad line is named."""

from __future__ import annotations

import gzip
import json

import pytest

from outrider.errors import ConfigError
from outrider.measure.prompts import Prompt, built_in, load_prompts, read_prompts


def write(path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_the_three_shapes(tmp_path):
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    path = write(
        tmp_path / "p.jsonl",
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "..."},
        "",
        {"question_id": 81, "turns": ["first", "second"], "category": "writing"},
        {"messages": messages},
    )
    assert read_prompts(path) == [
        Prompt("HumanEval/0", "def f():\n", "p"),
        Prompt("81", "first", "conversation"),
        Prompt("p.jsonl:4", messages, "p"),
    ]


def test_gzip_and_limit(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"prompt": "a"}\n{"prompt": "b"}\nnot json\n')
    assert [p.content for p in read_prompts(path, limit=2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("not json", "line 2 is not JSON"),
        ("[1]", "line 2 is no JSON object"),
        ('{"text": "a"}', "line 2 has no prompt"),
        ('{"prompt": ""}', "line 2 has no prompt"),
        ('{"prompt": "half \\ud83d"}', "line 2 has no prompt"),
        ("[" * 99999, "line 2 is not JSON"),
        ('{"turns": [1]}', "line 2 has no prompt"),
        ('{"messages": [{"role": "user"}]}', "line 2 has no prompt"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, part):
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, line)
    with pytest.raises(ConfigError, match=part) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.jsonl.gz", "."])
def test_a_file_that_cannot_be_read(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / name)


def test_files_that_are_not_what_they_say(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    (tmp_path / "c.jsonl").write_text("\n\n")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 99)[:-12])
    deflated = gzip.compress(b"x" * 9999)
    (tmp_path / "e.jsonl.gz").write_bytes(deflated[:10] + b"\xff" * 9 + deflated[19:])
    for name, part in [
        ("a.jsonl.gz", "read"),
        ("b.jsonl", "UTF-8"),
        ("c.jsonl", "no prompts"),
        ("d.jsonl.gz", "read"),
        ("e.jsonl.gz", "read"),
    ]:
        with pytest.raises(ConfigError, match=part):
            read_prompts(tmp_path / name)


def test_built_in_prompts():
    assert load_prompts(None) == built_in()
    assert load_prompts(None, 2) == built_in()[:2]
    with pytest.raises(ConfigError, match="limit=0"):
        load_prompts(None, 0)
