"""The commit in a drafter's provenance is that of the package that ran, or it says that nobody knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import outrider
from outrider.cli.provenance import commit

UNKNOWN = f"unknown (version {outrider.__version__}, no checkout)"


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Stands for the package, in a repository's `src` or in an environment that lies in a repository."""
    git(tmp_path, "init", "-q")

    def place(folder: str) -> Path:
        made = tmp_path / folder / "outrider"
        made.mkdir(parents=True)
        (made / "__init__.py").touch()
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", "a commit")
        monkeypatch.setattr(outrider, "__file__", str(made / "__init__.py"))
        return made

    return place


def test_a_checkout_is_asked(package, tmp_path):
    made = package("src")
    head = git(tmp_path, "rev-parse", "--short", "HEAD").strip()
    assert commit() == head
    (made / "__init__.py").write_text("changed = True")
    assert commit() == f"{head}-dirty"


def test_the_checkout_around_an_environment_is_another_programs(package):
    package("venv/lib/site-packages")
    assert commit() == UNKNOWN


def test_an_installed_package_says_what_it_was_built_from(package):
    made = package("venv/lib/site-packages")
    (made / "commit.txt").write_text("1234567\n")
    assert commit() == "1234567"


def test_without_git_nobody_knows(package, monkeypatch):
    package("src")
    monkeypatch.setenv("PATH", "")
    assert commit() == UNKNOWN
