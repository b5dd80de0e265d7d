"""`outrider bench` from prompts to page on a tiny model: JSON, Markdown and HTML agree, and a failed prompt shows."""

from __future__ import annotations

import json
import re

import pytest

from tests.server.tiny_chat import save_tiny_chat

WORDS = ("--drafter", "ngram", "--temperature", "0", "--temperature", "1", "--concurrency", "1", "--concurrency", "2",
         "--fixed-depth", "1", "--fixed-depth", "3", "--rival", "none", "--max-tokens", "16", "--num-slots", "512",
         "--no-self-test", "--threads", "1")  # fmt: skip


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> tuple[str, str]:
    """A model, and prompts of two tasks, one of which no context holds."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_chat(folder)
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": f"abc the {'abcdefghij'[i]} abc the", "category": "ab"[i % 2], "id": f"p{i}"} for i in range(10)]
    rows.append({"prompt": "abc the " * 600, "category": "b", "id": "too|long"})
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder), str(prompts)


def test_a_report_of_all_axes(asked, run, tmp_path):
    folder, prompts = asked
    ran = run("bench", folder, "--prompts", prompts, "--out", str(tmp_path / "out"), "--json", *WORDS)
    assert ran.code == 1, ran.err  # a prompt failed
    report = json.loads(ran.out.splitlines()[-1])
    assert report == json.loads((tmp_path / "out" / "bench.json").read_text())
    page, text = ((tmp_path / "out" / f"bench.{ending}").read_text() for ending in ("html", "md"))

    cells = [(row["temperature"], row["together"], (row["shape"] or {}).get("depth")) for row in report["speed"]]
    each = [(together, depth) for together in (1, 2) for depth in (None, 1, 3, None)]
    assert cells == [(t, together, depth) for t in (0.0, 1.0) for together, depth in each]
    for row in report["speed"]:
        for side in (row["overall"], row["plain"]):
            assert (side["runs"], side["failed"]) == ((11, 1) if row["together"] == 1 else (6, 1))
            assert side["tau"] == 1 + side["accepted"] / side["cycles"]
            assert sum(side["accepted_by_position"]) == side["accepted"]
            assert side["share_of_limit"] > 0
            seconds = sum(value for name, value in side["parts"].items() if name not in ("passes", "delivered"))
            answered = side["runs"] - side["failed"]
            assert seconds * side["tokens_per_second"] == pytest.approx(16 * row["together"] * answered, rel=0.2)
        whole = row["overall"]
        assert whole["interval"][0] <= whole["ratio_to_plain"] <= whole["interval"][1]
        assert row["speed"]["a"]["failed"] == 0
        assert row["plain"]["tau"] == row["plain"]["ratio_to_plain"] == 1
        if row["drafter"] == "ngram":
            assert whole["estimated"]["low"] <= whole["estimated"]["ratio"] <= whole["estimated"]["high"]
        assert 0 < whole["price_misses"]["all"]["cycles"] <= whole["parts"]["passes"]
    assert all("too|long" in f["prompt"].split(", ") for f in report["failures"])
    assert {f["who"] for f in report["failures"]} == {"ngram", "none", "plain"}
    found = [(cell["task"], cell["temperature"], cell["together"], cell["runs"]) for cell in report["cells"]]
    runs = {("a", 1): 5, ("b", 1): 5, ("a", 2): 3, ("b", 2): 2}  # of the second task one block has no answer
    assert found == [(task, t, n, runs[task, n]) for t in (0.0, 1.0) for n in (1, 2) for task in ("a", "b")]
    assert [(t["temperature"], len(t["points"])) for t in report["theory"]] == [(0.0, 6), (1.0, 6)]

    first = report["speed"][0]["overall"]
    low, high = first["interval"]
    assert f"| {first['ratio_to_plain']:.2f} ({low:.2f} to {high:.2f}) |" in text
    assert "| too\\|long | ngram, plain, none | the prompt has" in text
    assert "too|long" in page
    for heading in ("Failed", "Speed", "Never slower", "Depth: theory and measurement", "Acceptance by position",
                    "Latency", "Where the time goes", "Prices foretold", "Memory as planned, MiB"):  # fmt: skip
        assert f"## {heading}\n" in text
        assert f"<h2>{heading}</h2>" in page
    captions = re.findall(r"<figcaption>([^<]*)", page)
    begins = ("Speed-up by task", "Speed-up against temperature", "Speed-up against concurrency", "ngram, T = 0:",
              "ngram, T = 1:", "Acceptance by position", "Seconds for a thousand")  # fmt: skip
    assert [next(b for b in begins if c.startswith(b)) for c in captions] == list(begins)
    assert page.count("<svg ") == len(captions)
    assert "theory, rows priced" in page  # words of a plot are text


def test_the_page_stands_alone(asked, run, tmp_path):
    folder, prompts = asked
    words = WORDS[WORDS.index("--max-tokens") :]
    ran = run("bench", folder, "--prompts", prompts, "--limit", "2", "--out", str(tmp_path), *words)
    assert ran.code == 0, ran.err
    assert ran.out == (tmp_path / "bench.md").read_text()
    page = (tmp_path / "bench.html").read_text()
    elsewhere = {host for host in re.findall(r"https?://[\w.-]+", page) if not host.endswith("w3.org")}
    assert elsewhere == set()
    assert not re.findall(r"<(?:script|link|img|iframe)|@import|\bsrc=", page)
    assert not re.findall("#0a0a0|#0[123]0[123]", page)  # colours are the page's own
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))


def test_wrong_options_are_refused(run, tmp_path):
    (tmp_path / "file").write_text("")
    for words, said in (
        (["--fixed-depth", "9", "--depth", "4"], "fixed_depth=9 is more than depth=4"),
        (["--against", "float32", "--temperature", "1"], "against is greedy"),
        (["--rival", "ngram"], "give --fixed-depth"),
        (["--rival", "none", "--drafter", "ngram,suffix"], "rival is for one drafter"),
        (["--out", str(tmp_path / "file")], "cannot be a folder"),
        (["--temperature", "-1"], "temperature=-1"),
    ):
        ran = run("bench", "m", *words)
        assert (ran.code, said in ran.err) == (2, True), ran.err
