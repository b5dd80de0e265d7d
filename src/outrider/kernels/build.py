"""Compiles the native CPU kernels on first use with the machine's own compiler, and keeps what it built."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider.config import cache_folder
from outrider.errors import KernelError

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi")
"""Never -ffast-math, which lets a compiler reorder sums; no contraction, so that only written fusions are made."""

_REMEDY = "install a C++ compiler (g++ or clang++, or `pip install ziglang`), or choose kernels='plain'"
_ROOM = "set OUTRIDER_CACHE to another folder, or choose kernels='plain'"
_SECONDS = 300


def compilers() -> list[list[str]]:
    """Compiler commands to try, best first: `$CXX`, then what is on the path, then the one in the package ziglang.

    Raises:
        KernelError: if `$CXX` cannot be read as a command.
    """
    try:
        found = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else []
    except ValueError as error:
        raise KernelError(f"CXX={os.environ['CXX']!r} is no command ({error}): {_REMEDY}") from error
    found += [[path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "c++"])
    return found


def build(target: tuple[str, ...] = ("-march=native",)) -> Path:
    """The shared library for this machine, compiled if it is not in the cache yet.

    target: the flags that choose the instruction set.

    Raises:
        KernelError: if no compiler is there or none succeeds, or the cache folder cannot be written.
    """
    commands = compilers()
    if not commands:
        raise KernelError(f"the native kernels need a compiler and none was found: {_REMEDY}")
    said = ""
    for command in commands:
        # Without OpenMP the kernels run their own threads, so the second try is a slower start and nothing else.
        for threading in (("-fopenmp",), ("-pthread",)):
            try:
                return _build_with(command, [*FLAGS, *target, *threading])
            except (OSError, subprocess.SubprocessError) as error:
                said = str(getattr(error, "stderr", "") or error).strip()
    if "No space left" in said:
        raise KernelError(f"no space is left to compile the native kernels: free some, or {_ROOM}")
    last = said.splitlines()[-1] if said else "it said nothing"
    raise KernelError(f"the native kernels did not compile ({last}): {_REMEDY}")


def _build_with(command: list[str], flags: list[str]) -> Path:
    folder, stem = cache_folder() / "kernels", f"cpu-{_fingerprint(command, flags)}"
    for library in folder.glob(f"{stem}-*.so"):
        if library.name == _name(stem, library):  # one that was damaged would take the process down with it
            return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Built beside its place and renamed: two processes may build at once, and a killed one leaves nothing to load.
        handle, name = tempfile.mkstemp(dir=folder, suffix=".building")
    except OSError as error:
        raise KernelError(f"{folder} cannot be written ({error.strerror}): {_ROOM}") from error
    os.close(handle)
    try:
        subprocess.run(
            [*command, *flags, "-o", name, str(SOURCES / "kernels.cpp")],
            check=True,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        library = folder / _name(stem, Path(name))
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)
    return library


def _name(stem: str, library: Path) -> str:
    """A library's file name ends in the checksum of its contents."""
    return f"{stem}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"


def _fingerprint(command: list[str], flags: list[str]) -> str:
    """A name for all that the library depends on: sources, flags, the compiler's version, the CPU."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True, timeout=_SECONDS)
    for part in (*flags, version.stdout, platform.machine(), *cpu_flags()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def cpu_flags() -> list[str]:
    """What `-march=native` looks at, as far as the system tells: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
