"""A folder that is replaced as a whole: whenever the process is killed, the old one or the new one is found again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path

_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{32}\.old")
"""The old folder while the new one takes its place: `.NAME.<hex>.old`."""


def replace(fresh: Path, folder: Path) -> None:
    """Put a complete folder, `.NAME.<32 hex digits>` beside it, in the place of NAME; the old one then lies at `fresh`.

    Raises:
        OSError: where that fails; the old one is back then.
    """
    if not folder.exists():
        fresh.rename(folder)
        return
    for stale in _aside(folder):
        shutil.rmtree(stale, ignore_errors=True)
    old = fresh.with_name(f"{fresh.name}.old")
    folder.rename(old)
    try:
        fresh.rename(folder)
    except OSError:
        restore(folder)
        raise
    old.rename(fresh)  # under a name that `restore` does not know: half deleted it must not come back


def restore(folder: Path) -> None:
    """Bring back a folder whose replacement was killed between its two renames; any other is left as it is."""
    with suppress(OSError, ValueError):  # a disk that only reads cannot have lost it, and a name may be no path at all
        for old in _aside(folder):
            if not folder.exists():
                old.rename(folder)


def restore_all(parent: Path) -> None:
    """As `restore`, for every folder of one."""
    for old in parent.glob(".*.old"):
        found = _ASIDE.fullmatch(old.name)
        if found:
            restore(parent / found[1])


def _aside(folder: Path) -> Iterator[Path]:
    return (old for old in folder.parent.glob(f".{escape(folder.name)}.*.old") if _ASIDE.fullmatch(old.name))
