"""The Open Inference Protocol, version 2: bytes of requests to tensors, and answers to bytes.

JSON, and the binary tensor data extension, in which the bytes of tensors follow the JSON.

Sources: https://github.com/kserve/open-inference-protocol (specification/protocol) and, of the
extension, https://github.com/triton-inference-server/server (docs/protocol).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from cupyrec.data import fields
from cupyrec.serving import json_numbers

__all__ = ["Request", "Tensor", "answer", "column_of", "joined", "numbers_of", "read_request"]

_DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in [
        ("FP32", "<f4"), ("FP64", "<f8"),
        ("INT8", "i1"), ("INT16", "<i2"), ("INT32", "<i4"), ("INT64", "<i8"),
        ("UINT8", "u1"), ("UINT16", "<u2"), ("UINT32", "<u4"), ("UINT64", "<u8"),
    ]
}  # fmt: skip
_LENGTH = struct.Struct("<I")  # before each element of BYTES
_JSON = [(b"content-type", b"application/json")]


class Tensor(NamedTuple):
    """An input as it was sent: a list out of JSON, as an array if it was of numbers alone, or the
    bytes that followed it, of which `joined` makes a list of each element's.

    Examples
    --------
    >>> numbers_of("ids", Tensor("INT64", (2, 1), [5, 6]))
    array([[5],
           [6]])
    """

    datatype: str
    shape: tuple[int, ...]
    data: list | np.ndarray | memoryview


class Request(NamedTuple):
    """What an inference request says.

    Attributes
    ----------
    id : str, optional
        Echoed in the answer.
    inputs : dict of Tensor
        By name.
    outputs : list of (str, bool), optional
        Which are asked for, and whether as binary data; None for all.
    binary : bool
        Whether those that `outputs` doesn't name are sent as binary data.

    Examples
    --------
    See `read_request`.
    """

    id: str | None
    inputs: dict[str, Tensor]
    outputs: list[tuple[str, bool]] | None
    binary: bool


def read_request(body: bytes, json_length: int | None = None) -> Request:
    """Return what the body of an inference request says.

    Parameters
    ----------
    body : bytes
    json_length : int, optional
        The header ``Inference-Header-Content-Length``: how many of the bytes are JSON; by default
        all.

    Raises
    ------
    ValueError, TypeError
        It is not such a body. No number that it states is trusted before it is compared with the
        bytes that are there.

    Examples
    --------
    >>> text = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2.5]}]}'
    >>> numbers_of("x", read_request(text).inputs["x"])
    array([1. , 2.5], dtype=float32)
    """
    if json_length is None:
        json_length = len(body)
    if not 0 <= json_length <= len(body):
        raise ValueError(
            "Inference-Header-Content-Length: must be at most the length of the body, "
            f"{len(body)}, got {json_length}."
        )
    view = memoryview(body)
    try:
        said = json_numbers.loads(body if json_length == len(body) else body[:json_length])
    except ValueError as error:
        raise ValueError(f"body: must be JSON, got: {str(error).rstrip('.')}.") from None
    said = _of("body", said, dict)
    binary, at, inputs = view[json_length:], 0, {}
    for entry in _of("'inputs'", said.get("inputs"), list):
        name, tensor, at = _read_input(entry, binary, at)
        if name in inputs:
            raise ValueError(f"{_input(name)}: must occur once among 'inputs', got it twice.")
        inputs[name] = tensor
    if at < len(binary):
        raise ValueError(
            f"body: binary tensors must fill what follows the JSON, got {len(binary) - at} bytes "
            "more."
        )
    told = said.get("id")
    if told is not None:
        _of("'id'", told, str)
    parameters = _of("'parameters'", said.get("parameters", {}), dict)
    as_binary = _of("'binary_data_output'", parameters.get("binary_data_output", False), bool)
    outputs = said.get("outputs")
    if outputs is not None:
        outputs = [_read_output(entry, as_binary) for entry in _of("'outputs'", outputs, list)]
    return Request(told, inputs, outputs, as_binary)


def _read_input(entry: Any, binary: memoryview, at: int) -> tuple[str, Tensor, int]:
    """An input by its name, and where in `binary` the next one's bytes begin."""
    entry = _of("an input", entry, dict)
    name = _of("the name of an input", entry.get("name"), str)
    datatype, shape = entry.get("datatype"), entry.get("shape")
    if type(datatype) is not str or (datatype not in _DTYPES and datatype != "BYTES"):
        raise ValueError(
            f"{_input(name)}: 'datatype' must be one of {', '.join(_DTYPES)}, BYTES, "
            f"got {_short(datatype)}."
        )
    if not _is_shape(shape):
        raise ValueError(
            f"{_input(name)}: 'shape' must be one or two integers of 0 to 2^31 - 1, "
            f"got {_short(shape)}."
        )
    size = None
    if "parameters" in entry:
        parameters = _of("an input's 'parameters'", entry["parameters"], dict)
        if "shared_memory_region" in parameters:
            raise ValueError(f"{_input(name)}: must be sent, got one that lies in shared memory.")
        size = parameters.get("binary_data_size")
    if size is None:
        return name, Tensor(datatype, tuple(shape), _flat(name, entry.get("data"), shape)), at
    if "data" in entry:
        raise ValueError(f"{_input(name)}: must have 'data' or 'binary_data_size', got both.")
    if type(size) is not int or not 0 <= size <= len(binary) - at:
        raise ValueError(
            f"{_input(name)}: 'binary_data_size' must be at most the {len(binary) - at} bytes that "
            f"are left of the body, got {_short(size)}."
        )
    count = math.prod(shape)
    if datatype != "BYTES" and size != count * _DTYPES[datatype].itemsize:
        raise ValueError(
            f"{_input(name)}: 'binary_data_size' must be {count * _DTYPES[datatype].itemsize} for "
            f"{datatype} of shape {shape}, got {size}."
        )
    return name, Tensor(datatype, tuple(shape), binary[at : at + size]), at + size


def _is_shape(value: Any) -> bool:
    if type(value) is not list or not 1 <= len(value) <= 2:
        return False
    for length in value:  # by far the fastest way, and there may be many inputs
        if type(length) is not int or not 0 <= length < 1 << 31:
            return False
    return True


def _flat(name: str, data: Any, shape: list[int]) -> list | np.ndarray:
    """The elements of `data`, which may be nested as the shape is, side by side."""
    if type(data) is list and len(shape) == 1 and len(data) == shape[0]:
        return data
    if isinstance(data, np.ndarray) and (data.ndim == 1 or data.shape == (*shape,)):
        data = data.ravel()
    elif isinstance(data, np.ndarray):
        data = data.tolist()
    data = data if isinstance(data, np.ndarray) else _of("an input's 'data'", data, list)
    if len(shape) == 2 and len(data) and type(data[0]) is list:
        if {*map(type, data)} != {list} or {*map(len, data)} != {shape[1]}:
            raise ValueError(f"{_input(name)}: 'data' must be nested as its shape is, {shape}.")
        data = list(itertools.chain.from_iterable(data))
    if len(data) != math.prod(shape):
        raise ValueError(
            f"{_input(name)}: 'data' must have {math.prod(shape)} elements, as its shape is "
            f"{shape}, got {len(data)}."
        )
    return data


def _read_output(entry: Any, as_binary: bool) -> tuple[str, bool]:
    entry = _of("an output", entry, dict)
    name = _of("the name of an output", entry.get("name"), str)
    parameters = _of("an output's 'parameters'", entry.get("parameters", {}), dict)
    for other in ("classification", "shared_memory_region"):
        if other in parameters:
            raise ValueError(f"output {_short(name)}: '{other}' must not be asked for.")
    return name, _of("'binary_data'", parameters.get("binary_data", as_binary), bool)


def joined(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one, of which each has its rows behind those of the one before.

    Parameters
    ----------
    name : str
    tensors : sequence of Tensor
        Of one datatype, number of dimensions and width, and with data of one kind and dtype.

    Raises
    ------
    ValueError
        Bytes are not the elements of BYTES that there must be: none shall take the next one's.

    Examples
    --------
    >>> joined("x", [Tensor("INT64", (1, 2), [1, 2]), Tensor("INT64", (2, 2), [3, 4, 5, 6])])
    Tensor(datatype='INT64', shape=(3, 2), data=[1, 2, 3, 4, 5, 6])
    """
    if len(tensors) == 1:
        return tensors[0]
    (datatype, *_), shapes, parts = zip(*tensors, strict=True)
    shape = (sum([shape[0] for shape in shapes]), *shapes[0][1:])
    if isinstance(parts[0], np.ndarray):
        return Tensor(datatype, shape, np.concatenate(parts))
    if isinstance(parts[0], memoryview):
        if datatype != "BYTES":
            return Tensor(datatype, shape, memoryview(b"".join(parts)))
        parts = [_elements(name, tensor) for tensor in tensors]
    return Tensor(datatype, shape, [*itertools.chain.from_iterable(parts)])


def numbers_of(name: str, tensor: Tensor) -> np.ndarray:
    """Return a tensor of numbers as an array; that of binary data lies in the request's bytes.

    Raises
    ------
    TypeError
        An element is no number, or of integers no integer: nothing is cut off.
    ValueError
        An integer is out of range.

    Examples
    --------
    >>> numbers_of("ids", Tensor("INT64", (1,), [1.5]))
    Traceback (most recent call last):
        ...
    TypeError: input 'ids': 'data' must be integers, got a float.
    """
    if tensor.datatype == "BYTES":
        raise TypeError(f"{_input(name)}: 'datatype' must be one of numbers, got BYTES.")
    dtype, data = _DTYPES[tensor.datatype], tensor.data
    if isinstance(data, memoryview):
        return np.frombuffer(data, dtype).reshape(tensor.shape)
    if isinstance(data, np.ndarray):
        return _cast(name, tensor, dtype).reshape(tensor.shape)
    _check_types(name, data, _NUMBERS[dtype.kind])
    try:  # floats that are too large become infinite, which is for others to refuse
        return np.fromiter(data, dtype, len(data)).reshape(tensor.shape)
    except OverflowError:
        raise _out_of_range(name, tensor) from None


def _cast(name: str, tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    """Numbers of JSON as those of a datatype."""
    data = tensor.data
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return data.astype(dtype)
    if data.dtype.kind == "f":
        raise TypeError(f"{_input(name)}: 'data' must be integers, got a float.")
    if data.dtype == dtype:
        return data
    info = np.iinfo(dtype)
    if len(data) and not info.min <= int(data.min()) <= int(data.max()) <= info.max:
        raise _out_of_range(name, tensor)
    return data.astype(dtype)


_NUMBERS = {"f": {float, int}, "i": {int}, "u": {int}}
_KINDS = {
    type(None): "null", bool: "a bool", str: "a string", dict: "an object", float: "a float",
    int: "an integer", list: "a list",
}  # fmt: skip


def _check_types(name: str, data: list, allowed: set[type]) -> None:
    """Raise TypeError unless elements are of these types, of which bool, a kind of int, is none."""
    others = {*map(type, data)} - allowed
    if others:
        told = "integers" if allowed & {int, float} == {int} else "numbers"
        told = "strings" if str in allowed else told
        got = min(_KINDS[other] for other in others)
        raise TypeError(f"{_input(name)}: 'data' must be {told}, got {got}.")


def column_of(name: str, tensor: Tensor) -> pa.Array:
    """Return the elements of a tensor as an Arrow array, in which a null of JSON is one too.

    Raises
    ------
    TypeError, ValueError
        An element is not what the datatype says.

    Examples
    --------
    >>> column_of("city", Tensor("BYTES", (2,), ["Bonn", None])).to_pylist()
    ['Bonn', None]
    """
    data = tensor.data
    if tensor.datatype == "BYTES":
        if isinstance(data, memoryview):
            data = _elements(name, tensor)
        if len(data) and type(data[0]) is bytes:
            return pa.array(data, pa.binary())
        data = data if isinstance(data, list) else data.tolist()
        _check_types(name, data, {str, type(None)})
        return pa.array(data, pa.string())
    if not isinstance(data, list):
        return pa.array(numbers_of(name, tensor).ravel())
    dtype = _DTYPES[tensor.datatype]
    _check_types(name, data, _NUMBERS[dtype.kind] | {type(None)})
    if dtype.kind == "f":  # of which Arrow takes no integers above 2^53
        data = [value if value is None else float(value) for value in data]
    try:
        return pa.array(data, pa.from_numpy_dtype(dtype))
    except (OverflowError, pa.ArrowInvalid):
        raise _out_of_range(name, tensor) from None


def _elements(name: str, tensor: Tensor) -> list[bytes]:
    """The elements of BYTES sent as binary data: of each 4 bytes of its length, then its own."""
    at, elements, data, count = 0, [], bytes(tensor.data), math.prod(tensor.shape)
    while at + 4 <= len(data):
        start = at + 4
        at = start + _LENGTH.unpack_from(data, at)[0]
        elements.append(data[start:at])
    if at != len(data) or len(elements) != count:
        raise ValueError(
            f"{_input(name)}: its {len(data)} bytes must be {count} elements, each after 4 "
            f"bytes of its length, got {len(elements)} that take {at}."
        )
    return elements


def answer(
    request: Request, model: str, version: str, names: Sequence[str], values: np.ndarray
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return headers and body of the answer to a request.

    Numbers of JSON have so many digits that a reader gets the same bits, as float or double.

    Parameters
    ----------
    names : sequence of str
        Of T outputs; all of them, or those that the request asks for, are sent.
    values : (B, T) float32
        All finite.

    Raises
    ------
    ValueError
        The request asks for an output that there is not, or for one twice.

    Examples
    --------
    >>> request = Request("7", {}, None, False)
    >>> headers, body = answer(request, "dlrm", "1f", ["probability"], np.array([[0.5]], "f"))
    >>> print(body.decode())  # doctest: +NORMALIZE_WHITESPACE
    {"model_name":"dlrm","model_version":"1f","id":"7","outputs":[{"name":"probability","datatype":"FP32","shape":[1],"data":[0.5]}]}
    """
    wanted = request.outputs or [(name, request.binary) for name in names]
    if len({name for name, _ in wanted} & {*names}) < len(wanted):
        told = ", ".join(_short(name) for name, _ in wanted[:8])
        raise ValueError(f"'outputs': must be among {', '.join(names)}, each once, got {told}.")
    said: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id is not None:
        said["id"] = request.id
    outputs, parts = [], []
    for name, binary in wanted:
        column = values[:, names.index(name)]
        output = {"name": name, "datatype": "FP32", "shape": [len(column)]}
        if binary:
            parts.append(column.astype("<f4").tobytes())
            output["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            output["data"] = column.tolist()
        outputs.append(output)
    said["outputs"] = outputs
    text = orjson.dumps(said)
    if not parts:
        return _JSON, text
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", b"%d" % len(text)),
    ]
    return headers, b"".join([text, *parts])


def _of(where: str, value: Any, kind: type) -> Any:
    """`value`, if it is what JSON calls this kind."""
    if type(value) is not kind:
        raise TypeError(f"{where}: must be {_KINDS[kind]}, got {_short(value)}.")
    return value


def _input(name: str) -> str:
    return f"input {_short(name)}"


def _short(value: Any) -> str:
    """A value of JSON as sentences show it: not more of it than tells which it is."""
    if isinstance(value, str):
        return fields.shown(value)
    flat = type(value) is list and len(value) <= 8 and not {*map(type, value)} & {dict, list}
    if isinstance(value, (dict, list)) and not flat:
        return f"{_KINDS[type(value)]} of {len(value)}"
    return orjson.dumps(value).decode()


def _out_of_range(name: str, tensor: Tensor) -> ValueError:
    return ValueError(f"{_input(name)}: 'data' must be in the range of {tensor.datatype}.")
