"""What a deployment refuses, by whose name, and what its page of the docs says of it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from outrider.cli import main
from outrider.cli.app import app
from outrider.deploy.settings import DeployConfig
from outrider.errors import ConfigError
from tests.test_readme import commands_known

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text().split("## Replicas")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicas": 0}, "replicas=0 is out of range"),
        ({"min_replicas": 0}, "min_replicas=0"),
        ({"min_replicas": 3, "max_replicas": 2}, "raise it or lower that"),
        ({"replicas": 2, "max_replicas": 3}, "contradict"),
        ({"good_share": 0}, "good_share=0"),
        ({"good_share": float("nan")}, "good_share=nan"),
        ({"patience": 0}, "patience=0"),
        ({"cpus": float("nan")}, "cpus=nan"),
        ({"retries": -1}, "retries=-1"),
    ],
)
def test_what_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        DeployConfig(**settings)


def test_bounds():
    bounds = [(c.fewest, c.most) for c in (DeployConfig(), DeployConfig(replicas=3), DeployConfig(max_replicas=4))]
    assert bounds == [(1, 1), (3, 3), (1, 4)]


def test_without_ray_one_sentence_says_so(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "ray" or name.startswith("outrider.deploy.run")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["deploy", "smollm2-135m-instruct"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("outrider: deploy needs ray")
    assert 'install "outrider[ray]"' in said
    assert said.count("\n") == 1


def test_a_wrong_setting_is_refused_before_anything_is_started(capsys):
    assert main(["deploy", "no-such", "--replicas", "2", "--max-replicas", "3"]) == 2
    assert "contradict" in capsys.readouterr().err
    assert main(["deploy", "no-such", "--depth", "-1"]) == 2
    assert "depth" in capsys.readouterr().err


def test_rays_own_files_are_read_as_strictly(tmp_path):
    pytest.importorskip("ray", reason='needs "outrider[ray]"')
    from outrider.deploy.app import build

    for arguments, said in (
        ({}, "give model=NAME"),
        ({"model": "m", "replcas": "2"}, "did you mean 'replicas'"),
        ({"model": "m", "replicas": "two"}, "no number"),
        ({"model": "m", "tensor_parallel": "2"}, "a replica has one device"),
        ({"model": "m", "api_key_file": str(tmp_path / "none")}, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            build(arguments)
    settings = {"max_replicas": "4", "cpus": "2", "max_requests": "8", "page": "False", "drafter": "none", "gpus": 0.5}
    made = build({"model": "m", **settings})
    assert made is not None
    (page,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (served,) = yaml.safe_load(page)["applications"]
    module, _, name = served["import_path"].partition(":")
    assert getattr(importlib.import_module(module), name) is build
    assert build(served["args"]) is not None


def test_every_option_is_on_the_page():
    named = set(re.findall(r"(--[a-z][a-z-]+)", PAGE))
    assert {"--" + name.replace("_", "-") for name in DeployConfig.__dataclass_fields__} <= named
    assert named - {"--head", "--port", "--address"} <= commands_known(app)


def test_the_example_of_the_page_is_json():
    (body,) = re.findall(r"-d '(\{.*?\})'", PAGE, re.DOTALL)
    assert json.loads(body)["prompt"]
