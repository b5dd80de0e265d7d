"""The rules of the house, for every file: heads, lengths, who may speak, what may stand at module level."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "outrider"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NATIVE = sorted(path for path in PACKAGE.rglob("*") if path.suffix in {".cpp", ".h", ".hpp", ".cu"})
TEXTS = [
    *SOURCES,
    *TESTS,
    *NATIVE,
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *(ROOT / name for name in ("Makefile", "pyproject.toml", ".ci/run", ".pre-commit-config.yaml")),
]

FILE_LINES = 320
TEST_LINES = 400
"""About 300, with a little grace; tests are lists, and may be longer."""
FUNCTION_LINES = 60
"""A function over 50 lines wants a second look; over this it does not pass."""

FROZEN_CALLS = {"MappingProxyType", "frozenset", "tuple", "range", "compile"}
"""Functions that may make a module-level value; classes may too: their instances answer for themselves."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's nodes, parsed once for all rules."""
    return tuple(ast.walk(tree(path)))


def faults(paths: Iterable[Path], rule: Callable[[Path], Iterable[str]]) -> list[str]:
    """One test a rule, which names every fault of every file: a test a file and rule would be thousands."""
    return [f"{name(path)}: {fault}" for path in paths for fault in rule(path)]


def test_there_is_something_to_check():
    assert len(SOURCES) > 20
    assert len(TEXTS) > len(SOURCES)
    assert all(path.is_file() for path in TEXTS)


def test_every_rule_finds_what_it_forbids(monkeypatch, tmp_path):
    """A file that breaks them all is named by each."""
    monkeypatch.setattr("tests.test_house.ROOT", tmp_path)
    bad = tmp_path / "bad.py"
    long = "\n".join(f"    y = {i}" for i in range(FILE_LINES))
    undone = "TODO"
    bad.write_text(
        f"import torch\nstate = []\ntry:\n    print(1)\nexcept:  # {undone}\n    pass\n"
        f"try:\n    pass\nexcept Exception:\n    pass\ndef long():\n    global state\n{long}\n"
        "patch.setattr(time, 'monotonic', long)\npatch.setattr('outrider.llm.time.sleep', long)\n"
    )
    rules = (
        _headless,
        _too_long,
        _long_functions,
        _speech,
        _bare,
        _unexplained,
        _undone,
        _changeable,
        _globals,
        _clocks,
    )
    for rule in rules:
        found = faults([bad], rule)
        assert found, rule.__name__
        assert all(fault.startswith("bad.py: ") for fault in found)
    assert "torch" in _imported(bad)


def test_the_first_line_says_what_the_file_is_for():
    assert faults([*SOURCES, *TESTS], _headless) == []


def _headless(path: Path) -> Iterator[str]:
    if text(path) == "" and path.name == "__init__.py":
        return
    head = text(path).splitlines()[0]
    if not head.startswith('"""'):
        yield "begin with a docstring"
    elif len(head.strip('"')) <= 15:
        yield "say in one line what this file is for"


def test_files_fit_on_a_few_screens():
    assert faults([*SOURCES, *TESTS, *NATIVE], _too_long) == []


def _too_long(path: Path) -> Iterator[str]:
    if len(text(path).splitlines()) > (TEST_LINES if path in TESTS else FILE_LINES):
        yield "split the idea, not the file"


def test_functions_fit_on_one_screen():
    assert faults(SOURCES, _long_functions) == []


def _long_functions(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.body[0].lineno + 1
            if length > FUNCTION_LINES:
                yield f"{node.name} has {length} lines"


def test_nothing_below_the_command_line_prints():
    assert faults([path for path in SOURCES if "cli" not in path.parts], _speech) == []


def _speech(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {node.lineno}"
        if isinstance(node, ast.Attribute) and node.attr in {"stdout", "stderr"} and not _of_a_process(node):
            yield f"line {node.lineno}"


def _of_a_process(node: ast.Attribute) -> bool:
    """`done.stderr` of a finished subprocess is data; `sys.stderr` is speech."""
    return not (isinstance(node.value, ast.Name) and node.value.id == "sys")


def test_no_bare_except():
    assert faults([*SOURCES, *TESTS], _bare) == []


def _bare(path: Path) -> Iterator[str]:
    return (f"line {n.lineno}" for n in nodes(path) if isinstance(n, ast.ExceptHandler) and not n.type)


def test_a_broad_except_says_why():
    assert faults(SOURCES, _unexplained) == []


def _unexplained(path: Path) -> Iterator[str]:
    lines = text(path).splitlines()
    for node in nodes(path):
        if (
            isinstance(node, ast.ExceptHandler)
            and node.type
            and ast.unparse(node.type) in {"Exception", "BaseException"}
        ):
            reraised = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in node.body)
            if not reraised and "#" not in lines[node.lineno - 1]:
                yield f"line {node.lineno}: say why in a comment"


def test_nothing_is_left_undone():
    assert faults([*SOURCES, *TESTS, *NATIVE], _undone) == []


def _undone(path: Path) -> Iterator[str]:
    for comment in _comments(path):
        yield from re.findall(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b", comment)


def _comments(path: Path) -> Iterator[str]:
    if path.suffix != ".py":
        yield text(path)
        return
    for token in tokenize.generate_tokens(io.StringIO(text(path)).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_no_test_sets_the_clock_of_a_whole_process():
    """A server of another test may wait in it: an event loop that read a clock near zero sleeps for as long as the
    machine has run, and never hears that it is to stop. A module's own name for the clock can be set instead."""
    assert faults(TESTS, _clocks) == []


def _clocks(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            target = node.args[0]
            owner = target.value.rpartition(".")[0] if isinstance(target, ast.Constant) else ast.unparse(target)
            if owner.rpartition(".")[2] in {"time", "asyncio"}:
                yield f"line {node.lineno}: set {owner} of the module that is tested, not what all share"


def test_no_path_of_a_workplace():
    """A file names no folder of the machine it was written on."""
    folder = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|opt|Users)/[\w.-]+")
    assert faults(TEXTS, lambda path: folder.findall(text(path))) == []


def test_module_level_values_cannot_change():
    """Upper-case tables of literals are constants by name; anything else that can change is somebody's state."""
    assert faults(SOURCES, _changeable) == []


def _changeable(path: Path) -> Iterator[str]:
    for node in tree(path).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if not all(re.fullmatch(r"_?[A-Z][A-Za-z0-9_]*|__\w+__|app", name) for name in names):
            yield f"line {node.lineno}: {', '.join(names)} is a variable at module level"
        if _is_empty_container(node.value):
            yield f"line {node.lineno}: an empty container waits to be filled"
        elif isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).split("[")[0].split(".")[-1]
            if called not in FROZEN_CALLS and not called[0].isupper():
                yield f"line {node.lineno}: {called}() at import time"


def _is_empty_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in {"dict", "list", "set", "defaultdict", "deque"} and not value.args
    return (isinstance(value, (ast.List, ast.Set)) and not value.elts) or (
        isinstance(value, ast.Dict) and not value.keys
    )


def test_no_global_statement():
    assert faults(SOURCES, _globals) == []


def _globals(path: Path) -> Iterator[str]:
    return (f"line {node.lineno}" for node in nodes(path) if isinstance(node, ast.Global))


def test_deciders_import_no_torch():
    deciders = [path for path in SOURCES if path.parent.name == "control" or path.name == "scheduler.py"]
    assert deciders
    assert faults(deciders, lambda path: {"torch"} & set(_imported(path))) == []


def _imported(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def test_a_drafters_name_is_written_once():
    """Only the registry, the drafter itself and the place that decides "auto" know it; docstrings may mention it."""
    from outrider.registry import DRAFTERS

    texts = {name(path): set(_constants(path)) for path in SOURCES}
    for drafter in DRAFTERS:
        allowed = {f"src/outrider/{file}.py" for file in ("registry", "engine/resolve", f"drafters/{drafter}")}
        assert {file for file, constants in texts.items() if drafter in constants} <= allowed, f"{drafter}: typed again"


def _constants(path: Path) -> Iterator[str]:
    return (n.value for n in nodes(path) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def test_there_is_one_step():
    """Plain decoding, chains and trees share one cycle: no second generate loop hides in the package."""
    stepping = {
        name(path)
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and node.name == "step"
    }
    assert stepping == {"src/outrider/engine/step.py"}
