"""Which kernels are chosen, what a machine without a compiler is told, and that the self-test can fail."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from outrider.errors import KernelError
from outrider.kernels import _keep_compiled, build, select, self_test
from outrider.kernels.plain import PlainKernels

CPU = torch.device("cpu")


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compilers", list)
    return tmp_path


def test_every_kernel_keeps_the_contract(kernels, monkeypatch):
    if kernels.name == "triton":  # its interpreter takes its time, and has one tile for all widths anyway
        for name, value in {"WIDTHS": (17,), "_ROWS": 5, "_HEADS": 2, "_KV_HEADS": 1}.items():
            monkeypatch.setattr(sys.modules["outrider.kernels.self_test"], name, value)
    outcomes = self_test(kernels)
    assert {outcome.kernel for outcome in outcomes} >= {"linear q4", "linear float32", "attention bfloat16", "draw"}
    assert [outcome for outcome in outcomes if not outcome.passed] == []


def test_the_self_test_finds_a_row_that_minds_its_neighbours():
    class Leaky(PlainKernels):
        def rms_norm(self, x, weight, eps, out=None):
            return super().rms_norm(x, weight, eps, out) + 1e-6 * x.shape[0]

    failed = [outcome for outcome in self_test(Leaky(CPU)) if not outcome.passed]
    assert [outcome.kernel for outcome in failed] == ["rms_norm"]
    assert "width 2" in failed[0].detail


def test_plain_and_devices():
    assert select("plain", CPU).name == "plain"
    with pytest.raises(KernelError, match="kernels='plain'"):
        select("native", torch.device("cuda"))


def test_without_a_compiler_auto_is_plain_and_native_says_what_to_do(no_compiler):
    assert select("auto", CPU).name == "plain"
    with pytest.raises(KernelError, match="install a C\\+\\+ compiler"):
        select("native", CPU)


def test_a_failing_compiler_leaves_nothing_behind(no_compiler, monkeypatch):
    monkeypatch.setattr(build, "compilers", lambda: [["false"]])
    with pytest.raises(KernelError, match="did not compile"):
        select("native", CPU)
    assert list(no_compiler.rglob("*.so")) == []
    assert list(no_compiler.rglob("*.building")) == []


def test_a_damaged_library_is_built_anew_and_never_loaded(monkeypatch, tmp_path):
    """A truncated one would end the process with a bus error, not with an exception."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "compilers", lambda: [[str(compiler)]])
    library = build.build()
    assert build.build() == library
    library.write_text("libr")
    assert build.build() == library
    assert library.read_text() == "library\n"
    assert [path.name for path in library.parent.iterdir()] == [library.name]


def test_a_cache_that_cannot_be_written_is_named_and_not_the_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "compilers", lambda: [["true"]])
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(KernelError, match=r"cannot be written .*: set OUTRIDER_CACHE"):
        select("native", CPU)
    assert select("auto", CPU).name == "plain"


def test_a_compiler_variable_that_is_no_command_is_named(monkeypatch):
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(KernelError, match="CXX="):
        select("native", CPU)
    assert select("auto", CPU).name == "plain"


def test_the_cache_knows_sources_flags_and_compiler(monkeypatch, tmp_path):
    command = build.compilers()[0] if build.compilers() else pytest.skip("no compiler is installed here")
    here = build._fingerprint(command, ["-O3"])
    assert here == build._fingerprint(command, ["-O3"])
    assert here != build._fingerprint(command, ["-O2"])
    changed = tmp_path / "cpu"
    changed.mkdir()
    (changed / "kernels.cpp").write_text("// other")
    monkeypatch.setattr(build, "SOURCES", changed)
    assert here != build._fingerprint(command, ["-O3"])


def test_what_triton_compiles_is_kept_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back as it was
    monkeypatch.delenv("TRITON_CACHE_DIR")
    _keep_compiled()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    _keep_compiled()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"


def test_where_the_cache_folder_cannot_be_written_triton_keeps_its_own(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back as it was
    monkeypatch.delenv("TRITON_CACHE_DIR")
    _keep_compiled()
    assert "TRITON_CACHE_DIR" not in os.environ
