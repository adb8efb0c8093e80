"""The way in which a checkpoint's matrices are quantised, or are to be rounded when they are loaded; free of
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nbengine.config.model import ROUNDINGS
from nbengine.errors import ModelLoadError, quoted

WORD_BITS = 32
"""AWQ and GPTQ pack levels into 32-bit integers."""
_KEY = "quantization_config"
_METHODS = ("awq", "gptq", "mxfp4", "fp8")


@dataclass(frozen=True, slots=True)
class Rounding:
    """Matrices in 16 or 32 bits are rounded to `bits` each, in blocks with a scale of their own."""

    bits: int


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """Matrices are stored as the levels of AWQ or GPTQ, with a scale and a zero point for each group of
    `group_size` columns; None: a row is one group.

    `zero_offset` is what has to be added to stored zero points. `act_order`: the groups are not runs of
    columns, and each matrix says which column belongs to which.
    """

    method: Literal["awq", "gptq"]
    bits: int
    group_size: int | None
    zero_offset: int = 0
    act_order: bool = False

    @property
    def per_word(self) -> int:
        """Return the levels in a word."""
        return WORD_BITS // self.bits


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The matrices of experts are stored in MXFP4 (gpt-oss)."""

    method: Literal["mxfp4"] = "mxfp4"


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Matrices are stored in 8-bit floating point, with a scale for each block of `rows` and `columns` (DeepSeek-V3),
    and held dense."""

    rows: int
    columns: int
    method: Literal["fp8"] = "fp8"


Quantization = Rounding | ZeroPoints | Mxfp4 | Fp8Blocks


def asked_rounding(name: str) -> Rounding:
    """Return what the engine argument `quantization` asks for."""
    return Rounding(ROUNDINGS[name])


def stored_quantization(hf: Mapping[str, Any]) -> ZeroPoints | Mxfp4 | Fp8Blocks | None:
    """Return what config.json says of its matrices; None: they are not quantised.

    Raises:
        ModelLoadError: they are quantised in a way that is not supported; the message names the entry.
    """
    stated = hf.get(_KEY)
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise ModelLoadError(f"config.json: {_KEY} must be an object, got {quoted(stated)}")
    method = _entry(stated, "quant_method", _METHODS)
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8":
        return _fp8_blocks(stated)
    if method == "awq":
        _entry({**stated, "version": str(stated.get("version", "gemm")).lower()}, "version", ("gemm",))
        return ZeroPoints("awq", _entry(stated, "bits", (4,), "w_bit"), _group_size(stated))
    version = _entry({"checkpoint_format": "gptq", **stated}, "checkpoint_format", ("gptq", "gptq_v2"))
    if stated.get("is_marlin_format"):
        raise ModelLoadError(f"config.json: {_KEY}.is_marlin_format is not supported; convert it to 'gptq'")
    return ZeroPoints(
        "gptq",
        _entry(stated, "bits", (4, 8)),
        _group_size(stated),
        zero_offset=1 if version == "gptq" else 0,
        act_order=bool(stated.get("desc_act", False)),
    )


def _fp8_blocks(stated: Mapping[str, Any]) -> Fp8Blocks:
    match stated.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Fp8Blocks(rows, columns)
        case value:
            raise ModelLoadError(
                f"config.json: {_KEY}.weight_block_size {quoted(value)} is not supported; supported: two positive "
                "integers, the rows and columns of a block that has a scale"
            )


def _entry(stated: Mapping[str, Any], key: str, allowed: tuple[Any, ...], older: str = "") -> Any:
    value = stated.get(key, stated.get(older))
    if isinstance(value, bool) or value not in allowed:
        raise ModelLoadError(
            f"config.json: {_KEY}.{key} {quoted(value)} is not supported; "
            f"supported: {', '.join(map(str, allowed))}"
        )
    return value


def _group_size(stated: Mapping[str, Any]) -> int | None:
    value = stated.get("group_size", stated.get("q_group_size"))
    if value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(
            f"config.json: {_KEY}.group_size must be a positive integer or -1, got {quoted(value)}"
        )
    return value
