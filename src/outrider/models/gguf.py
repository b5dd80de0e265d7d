"""The header of a GGUF file: what it holds and where, checked against the file's length."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from outrider.errors import ModelError

PACKED_TYPES = frozenset({GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0})
"""Block types whose bits the packed kernels read as they are."""

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: shape in torch's order, block type, first byte in the file, length in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (arrays are left out) and the table of tensors."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    @property
    def is_packable(self) -> bool:
        """Whether every matrix is of a type that the packed kernels read (vectors are kept in float32)."""
        return all(t.kind in PACKED_TYPES for t in self.tensors if len(t.shape) > 1)


def read_header(path: Path) -> GgufHeader:
    """Read a header without touching tensor data.

    The layout is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.

    Raises:
        ModelError: if the file is no GGUF, of another version, or shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            header = _read(file, path)
    except (struct.error, EOFError, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is cut short or damaged in its header ({error}): download it again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from error
    size = path.stat().st_size
    needed = max((t.start + t.nbytes for t in header.tensors), default=0)
    if size < needed:
        raise ModelError(f"{path} is cut short ({size:,} of {needed:,} bytes): download it again")
    return header


def _read(file: BinaryIO, path: Path) -> GgufHeader:
    magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file (it starts with {magic!r}): check what was downloaded")
    version, num_tensors, num_fields = _take(file, "<IQQ")
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}, and versions 2 and 3 are read: convert it again")
    metadata = {}
    for _ in range(num_fields):
        key = _string(file)
        value = _value(file, GGUFValueType(_take(file, "<I")[0]))
        if value is not None:
            metadata[key] = value
    table = []
    for _ in range(num_tensors):
        name = _string(file)
        (num_dims,) = _take(file, "<I")
        shape = tuple(reversed(_take(file, f"<{num_dims}Q")))
        kind, offset = _take(file, "<IQ")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        table.append((name, shape, GGMLQuantizationType(kind), offset, prod(shape) // block * block_bytes))
    alignment = int(metadata.get("general.alignment", 32))
    data = -(-file.tell() // alignment) * alignment
    return GgufHeader(metadata, tuple(GgufTensor(n, s, k, data + offset, size) for n, s, k, offset, size in table))


def _value(file: BinaryIO, kind: GGUFValueType) -> Any:
    """One value; None for an array, which is stepped over."""
    if kind in _SCALARS:
        return _take(file, _SCALARS[kind])[0]
    if kind == GGUFValueType.STRING:
        return _string(file)
    inner, count = _take(file, "<IQ")
    if GGUFValueType(inner) in _SCALARS:
        file.seek(count * struct.calcsize(_SCALARS[GGUFValueType(inner)]), 1)
    else:
        for _ in range(count):
            _value(file, GGUFValueType(inner))
    return None


def _string(file: BinaryIO) -> str:
    return _bytes(file, _take(file, "<Q")[0]).decode("utf-8")


def _take(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, _bytes(file, struct.calcsize(layout)))


def _bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise EOFError("unexpected end of file")
    return data
