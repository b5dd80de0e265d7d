"""Commands that serve in a process of their own, for tests: what they start with, and where they listen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path


def environment(cache: Path, **more: str) -> dict[str, str]:
    """This process's, with its packages and a cache folder of the test's."""
    paths = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": paths, "OUTRIDER_CACHE": str(cache), **more}


def address_of(process: subprocess.Popen[str]) -> str:
    """Wait until it says where it serves; what it says after that is read and dropped."""
    assert process.stderr is not None
    url, said = None, ""
    while url is None:
        line = process.stderr.readline()
        said += line
        assert line, f"it ended before it served: {said}"
        found = re.search(r"is served at (http://[\d.]+:\d+)", line)
        url = found and found[1]
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return url
