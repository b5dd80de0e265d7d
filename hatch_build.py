"""A step of the build: what is made from a checkout says of which commit it is, in `commit.txt`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "commit.txt"


class CommitHook(BuildHookInterface):
    """In the root of a source archive, from where it goes into the package of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root, made = Path(self.root), Path(self.directory) / NAME
        if version == "editable":
            return  # the checkout itself is asked when it matters
        if (root / ".git").exists():
            command = ["git", "-C", self.root, "describe", "--always", "--dirty", "--exclude=*"]
            described = subprocess.run(command, capture_output=True, text=True, check=False)
            if described.returncode:
                return
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_text(described.stdout)
        elif (root / NAME).exists():
            made = root / NAME
        else:
            return
        build_data["force_include"][str(made)] = f"outrider/{NAME}" if self.target_name == "wheel" else NAME

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        (Path(self.directory) / NAME).unlink(missing_ok=True)
