"""Weights that a library has quantised: what is needed to load them, and where they become dense again."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError

LIBRARIES: Mapping[str, str] = MappingProxyType({"torchao": "torchao", "compressed-tensors": "compressed_tensors"})
"""What a config calls the method, and the package that knows it."""
_PACKED = "compressed-tensors"


def method(config: Any) -> str | None:
    """How a model's config says that its weights are quantised; None where it does not."""
    found = _stated(config).get("quant_method")
    return None if found is None else str(getattr(found, "value", found))


def prepare(name: str, config: Any) -> None:
    """Before a module is read: see that the library is here, and have weights made dense that are multiplied dense.

    Weights of compressed-tensors whose activations are not quantised are decompressed before the first product anyway;
    where one scheme holds for all of them that is done as they are read, so that lean layers may take them.

    Raises:
        ModelError: naming what to install.
    """
    found = method(config)
    if found is not None and found in LIBRARIES and importlib.util.find_spec(LIBRARIES[found]) is None:
        raise ModelError(
            f'{name} has weights that {found} quantised, and that is not installed: pip install "outrider[quantised]"'
        )
    if found == _PACKED:
        stated = _stated(config)
        groups = list((stated.get("config_groups") or {}).values())
        if len(groups) == 1 and isinstance(groups[0], Mapping) and not groups[0].get("input_activations"):
            config.quantization_config = {**stated, "dequantize": True}


def settle(module: Any) -> None:
    """After a module was read: what compressed-tensors would decompress before a first product is so now."""
    is_dense_already = getattr(getattr(module.config, "quantization_config", None), "dequantize", False)
    if method(module.config) == _PACKED and not is_dense_already:
        with torch.no_grad():
            module(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)


def refuse_again(name: str, config: Any, dtype: str, widen: str | None) -> None:
    """Refuse what would round quantised weights a second time, or needs them in floats.

    Raises:
        ModelError: naming the setting.
    """
    found = method(config)
    if found is not None and dtype == "int8":
        raise ModelError(f"{name} has weights that {found} quantised already: leave dtype out")
    if found is not None and widen is not None:
        raise ModelError(
            f"{name} has weights that {found} quantised, and a widened twin has float weights: leave widen out"
        )


def speaks(config: Any) -> bool:
    """Whether its library shows bars of its own."""
    return method(config) == _PACKED


def is_dense(parameter: Tensor) -> bool:
    """Whether it is a plain tensor, and not a library's own kind of one."""
    return type(parameter) in (Tensor, nn.Parameter, nn.Buffer)


def dense(weight: Tensor) -> Tensor:
    """A plain tensor of the same numbers."""
    weight = weight.detach()
    return weight if is_dense(weight) else weight.dequantize()


def in_words(module: nn.Module) -> str:
    """The kind of a module's weights."""
    floats: Any = module.dtype
    words = f"{str(floats).removeprefix('torch.')} weights"
    if all(is_dense(parameter) for parameter in module.parameters()):
        return words
    return f"weights quantised by {method(module.config)}, and {words},"


def nbytes(module: nn.Module) -> int:
    """Bytes of all weights of a module, shared ones once."""
    parts = [part for parameter in module.parameters() for part in _parts(parameter)]
    return sum(part.nbytes for part in {part.data_ptr(): part for part in parts}.values())


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors of which it is made."""
    if is_dense(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from _parts(getattr(tensor, name))


def _stated(config: Any) -> Mapping[str, Any]:
    stated = getattr(config, "quantization_config", None)
    if stated is None or isinstance(stated, Mapping):
        return stated or {}
    return dict(stated.to_dict())
