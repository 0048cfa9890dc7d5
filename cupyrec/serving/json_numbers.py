"""JSON whose long lists of numbers become arrays, without an object of Python's for each number.

simdjson gives such lists as buffers, of any depth and flat, in a third of the time. Short texts,
and those of many lists, objects or names, are sooner read by orjson, which also reads those that
the other makes nothing of, and all on releases of Python that simdjson has no wheels for yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

try:
    import simdjson
except ModuleNotFoundError:
    simdjson = None

__all__ = ["loads"]

_SHORT = 4096  # bytes
_FEW = 64  # bytes of a text for each list or object; of more of them orjson is several times faster
_NAMES = 32  # of an object
_KINDS = ("i", np.int64), ("u", np.uint64), ("d", np.float64)


def loads(text: bytes) -> Any:
    """Return what JSON says; lists of numbers alone that are named ``data`` maybe as arrays.

    Those of integers that 64 bits hold are (N,) int64 or uint64, others float64; lists of equally
    long such lists (N, M). Neither bools nor null are numbers.

    Raises
    ------
    ValueError
        It is no JSON.

    Examples
    --------
    >>> [*loads(b'{"data": [1, 2]}')["data"]] == [1, 2]
    True
    """
    is_long = simdjson is not None and len(text) > _SHORT
    if is_long and len(text) > _FEW * (text.count(b"[") + text.count(b"{")):
        try:
            reader = _Reader()
            said = reader.plain(simdjson.Parser().parse(text))
            if reader.lists == text.count(b"["):  # else one may stand among numbers
                return said
        except (ValueError, RuntimeError):
            pass
    return orjson.loads(text)


class _Reader:
    """What simdjson has found, as Python's objects; it counts the lists that it sees."""

    def __init__(self) -> None:
        self.lists = 0

    def plain(self, value: Any) -> Any:
        if isinstance(value, simdjson.Object):
            keys = [*value] if len(value) <= _NAMES else []
            if len({*keys}) < len(value):  # each is looked for from the first one on
                raise RuntimeError  # which orjson reads
            return {key: self._named(key, value[key]) for key in keys}
        if isinstance(value, simdjson.Array):
            self.lists += 1
            return [self.plain(own) for own in value]
        return value

    def _named(self, key: str, value: Any) -> Any:
        if key == "data" and isinstance(value, simdjson.Array):
            numbers = self._numbers(value)
            if numbers is not None:
                return numbers
        return self.plain(value)

    def _numbers(self, found: Any) -> np.ndarray | None:
        shape = (len(found),)
        if len(found) and isinstance(found[0], simdjson.Array):
            widths = {len(row) if isinstance(row, simdjson.Array) else -1 for row in found}
            if len(widths) > 1:
                return None
            shape = (len(found), *widths)
        for kind, dtype in _KINDS:
            try:
                array = np.frombuffer(found.as_buffer(of_type=kind), dtype).reshape(shape)
            except (TypeError, ValueError):
                continue
            self.lists += 1 if len(shape) == 1 else 1 + shape[0]
            return array
        return None
