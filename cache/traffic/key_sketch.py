"""HyperLogLog sketch of keys; replicas unite their sketches to count the distinct keys of all."""

import base64
import binascii
import math
from collections.abc import Iterable
from typing import Self

_INDEX_BITS = 9
_REGISTER_COUNT = 1 << _INDEX_BITS
_HASH_BITS = 64

# Flajolet, Fusy, Gandouet and Meunier, "HyperLogLog", 2007.
_BIAS_CORRECTION = 0.7213 / (1 + 1.079 / _REGISTER_COUNT)
_LINEAR_COUNTING_MAX = 2.5 * _REGISTER_COUNT


class KeySketch:
    """Sketch of the keys whose 64-bit hashes were added; the standard error of its count is at most 5 %."""

    def __init__(self, registers: bytes = bytes(_REGISTER_COUNT)) -> None:
        self._registers = bytearray(registers)

    def add(self, key_hash: int) -> None:
        """Add the 64-bit hash of a key."""
        index, remaining_bits = key_hash & (_REGISTER_COUNT - 1), key_hash >> _INDEX_BITS
        rank = _HASH_BITS - _INDEX_BITS - remaining_bits.bit_length() + 1
        if rank > self._registers[index]:
            self._registers[index] = rank

    @classmethod
    def unite(cls, sketches: Iterable[Self]) -> Self:
        """Return the sketch of the union of all these sets of keys."""
        union = cls()
        for sketch in sketches:
            union._registers = bytearray(map(max, union._registers, sketch._registers))
        return union

    def estimate_key_count(self) -> float:
        """Estimate the number of distinct keys."""
        estimate = _BIAS_CORRECTION * _REGISTER_COUNT**2 / sum(2.0**-rank for rank in self._registers)
        empty_registers = self._registers.count(0)
        if estimate <= _LINEAR_COUNTING_MAX and empty_registers:
            return _REGISTER_COUNT * math.log(_REGISTER_COUNT / empty_registers)
        return estimate

    def to_text(self) -> str:
        """Return the registers in base64."""
        return base64.b64encode(self._registers).decode()

    @classmethod
    def from_text(cls, registers_base64: str) -> Self:
        """Parse the result of `to_text`; raise ValueError for anything else."""
        try:
            registers = base64.b64decode(registers_base64, validate=True)
        except binascii.Error as error:
            raise ValueError(f"not a sketch of keys: {error}") from error
        if len(registers) != _REGISTER_COUNT:
            raise ValueError(f"a sketch of keys has {_REGISTER_COUNT} registers, not {len(registers)}")
        return cls(registers)
