"""The README and the page on tuning tell the truth: commands, options, drafters, JSON fields and figures exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from outrider.cli.app import app
from outrider.record import Tally
from outrider.registry import DRAFTERS
from outrider.result import Result

README = (Path(__file__).parents[1] / "README.md").read_text()
ROOT = Path(__file__).parents[1]
TUNING = (ROOT / "docs/tuning.md").read_text()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert {"demo", "test", "check"} <= named
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert all((ROOT / link).is_file() for link in links)


@pytest.mark.parametrize("line", re.findall(r"^\$ (outrider .*?)(?:\s+#.*)?$", README + TUNING, re.MULTILINE))
def test_commands_parse(line):
    words = re.findall(r'"[^"]*"|\S+', line)[1:]
    group = typer.main.get_command(app)
    verb = group.commands[words[0]]
    known = {name for p in verb.params for name in (*p.opts, *p.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


def commands_known(app: typer.Typer) -> set[str]:
    """Every option of every verb."""
    group = typer.main.get_command(app)
    return {name for v in group.commands.values() for p in v.params for name in (*p.opts, *p.secondary_opts)}


def test_options_exist():
    known = commands_known(app)
    own = re.sub("--(extra-index-url|speculative-config)", "", README)
    named = set(re.findall(r"`(?:[^`]* )?(--[a-z-]+)[^`]*`", own))
    assert {"--drafter-model", "--no-adaptive"} <= named <= known
    assert set(re.findall(r"`(?:[^`]* )?(--[a-z-]+)[^`]*`", TUNING)) <= known


def test_figures_for_tuning_were_measured():
    """Every number with a point stands in the measurements; and links lead somewhere."""
    measured = set(re.findall(r"\d+\.\d+", (ROOT / "docs/measurements.md").read_text()))
    told = set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", TUNING))
    assert len(told) > 40
    assert told <= measured
    assert all((ROOT / "docs" / link).is_file() for link in re.findall(r"\]\(([^)#]+)\)", TUNING))


def test_the_tunings_taus_are_those_of_the_tables():
    chains, trees = re.findall(
        r"^(?:Chains|Trees) .*?:\n\n(.*?)\n\n", (ROOT / "docs/measurements.md").read_text(), re.M | re.S
    )[:2]
    rows = re.findall(r"^\| `([\w+]+)` \| [^|]+ \| ([\d.]+) / ([\d.]+) \| ([\d.]+) / ([\d.]+) \|", TUNING, re.MULTILINE)
    assert len(rows) >= 8
    for drafter, *figures in rows:
        for table, (mean, code) in zip((chains, trees), (figures[:2], figures[2:]), strict=True):
            cells = next(line for line in table.splitlines() if line.startswith(f"| `{drafter}` |")).split(" | ")
            assert (cells[1].strip("*"), cells[8]) == (mean, code), drafter


def test_the_table_of_drafters_is_the_registry():
    section = README.split("## Drafters")[1].split("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [*DRAFTERS, "none"]


def test_every_field_of_the_json_is_explained():
    section = README.split("## Reading the JSON")[1].split("`outrider check")[0]
    result = Result("a", (1,), "stop", 1, "seed", 1, 0, None, None, Tally(), "none")
    fields = json.loads(json.dumps(result.to_json()))
    for name, value in fields.items():
        assert f"`{name}" in section
        for inner in value if isinstance(value, dict) and name in {"usage", "seconds"} else ():
            assert f"`{inner}`" in section
    assert set(fields["speculation"]) - {"drafter"} == set(
        re.findall(r"cycles|drafted|accepted_by_position|accepted|speed_up|tau", section)
    )
