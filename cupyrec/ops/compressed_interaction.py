"""A layer of xDeepFM's compressed interaction network. R rows, H and M columns, O outputs.

    p[r, i M + j] = x[r, i] * x0[r, j]             every product of the two, (R, H M)
    z = p @ weight.T + bias                        weight (O, H, M), taken for (O, H M)
    y = max(z, 0)                                  y = z, if `linear_output`

    dz = dy * (y > 0)                              dz = dy, if `linear_output`
    dweight = dz.T @ p        dbias = sum over R of dz        dp = dz @ weight
    dx[r, i] = sum over j of dp * x0[r, j]         dx0[r, j] = sum over i of dp * x[r, i]

A row is a column of the embeddings of a sample: R = B D, and x0[b D + d, j] is number d of its
embedding j. p is D times as much as the outer products of a batch: it is made for some rows at a
time, forward and again backward, so that a matmul finds it in the cache; on the CPU some columns of
x at a time, each product of 512 rows side by side. On a GPU bias and ReLU are part of the matmul.

With `amp`, a type of 16 bits, p, weight and dz are rounded to it; all else is float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, cublaslt, errors
from cupyrec.autograd import Function, Tensor
from cupyrec.cublaslt import Epilogue
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.cast import cast_matrices, padded, padded_width, rounded
from cupyrec.ops.halves import half_type, value_macros
from cupyrec.ops.live_products import live_products_cpu, live_sums_cpu
from cupyrec.ops.thin_matmul import THIN_COLUMNS

__all__ = ["compressed_interaction", "compressed_products", "compressed_sums"]

_NAME = "compressed_interaction"
_ROWS, _TERMS = 512, 320  # a block of the CPU: its products and their gradients fill an L2 cache
_SUMMED = 16  # terms of dx that are added up before they are added to others: sums lose less
_PARTS = 16  # of the rows, whose gradients of the weight are added up
_CHUNK = 128 << 20  # bytes of products on a device


@cpu.loop
def _products_cpu(x, x0, first, last, symmetric, p):
    """Products (terms, R) of rows `first` to `last` of x (H, R) and x0 (M, R)."""
    k = 0
    for i in range(first, last):
        for j in range(i if symmetric else 0, x0.shape[0]):
            for r in range(x.shape[1]):
                p[k, r] = x[i, r] * x0[j, r]
            k += 1


@cpu.loop
def _sums_cpu(dp, x, x0, first, last, symmetric, dx, dx0):
    rows, k = x.shape[1], 0
    part = np.empty(rows, x.dtype)
    for i in range(first, last):
        for start in range(i if symmetric else 0, x0.shape[0], _SUMMED):
            part[:] = 0
            for j in range(start, min(start + _SUMMED, x0.shape[0])):
                for r in range(rows):
                    part[r] += dp[k, r] * x0[j, r]
                    dx0[j, r] += dp[k, r] * x[i, r]
                k += 1
            for r in range(rows):
                dx[i, r] += part[r]


@cpu.loop
def _bias_relu_cpu(z, bias):
    zero = z.dtype.type(0)
    for r in range(z.shape[0]):
        for o in range(z.shape[1]):
            value = z[r, o] + bias[o]
            z[r, o] = zero if value <= zero else value  # NaN stays NaN


@cpu.loop
def _mask_cpu(dz, y):
    zero = y.dtype.type(0)
    for r in range(y.shape[0]):
        for o in range(y.shape[1]):
            value = dz[r, o]  # read in any case, so that there is no jump
            dz[r, o] = value if y[r, o] > zero else zero


def _turned(x: np.ndarray) -> np.ndarray:
    """Columns as rows, so that the loops above go along them."""
    return np.ascontiguousarray(x.T)


class _CompressedInteraction(Function):
    """With `amp`, arrays of float32 hold what is rounded to 16 bits.

    Where x is x0, product i M + j is product j M + i: there is one term of both, which is
    multiplied by the sum of their weights.
    """

    def forward(self, x, x0, weight, bias, linear_output, amp):
        self.symmetric, self.linear_output, self.amp = x is x0, linear_output, amp
        self.x, self.x0 = np.ascontiguousarray(x), np.ascontiguousarray(x0)
        self._take(weight)
        self.size = min(_ROWS, max(64, -(-len(x) // 8)))
        self.y = arrays.empty((len(x), len(weight)), x.dtype)

        def block(i: int, j: int) -> None:
            y = self.y[i:j]
            self._multiply(i, j, y)
            if linear_output:
                y += bias
            else:
                _bias_relu_cpu(y, bias)

        with cpu.serial_blas():
            cpu.parallel(block, len(x), self.size)
        return self.y

    def _take(self, weight):
        """Keep the weight as the matmuls want it."""
        _, h, m = weight.shape
        self.pairs = np.triu_indices(m) if self.symmetric else np.indices((h, m)).reshape(2, -1)
        self.groups = self._groups(h)
        self.weight = self._of_terms(rounded(weight, self.amp))

    def _multiply(self, i, j, y):
        """Write the weighted sums of rows i to j."""
        given = _turned(self.x[i:j]), _turned(self.x0[i:j])
        y[...] = 0
        for group in self.groups:
            y += self._products(group, *given).T @ self.weight[group[2]]

    def _groups(self, h: int) -> list[tuple[int, int, slice]]:
        """First and last column of x, and their terms: as many as are multiplied at once."""
        starts = np.searchsorted(self.pairs[0], np.arange(h + 1)).tolist()
        groups, first = [], 0
        for last in range(1, h + 1):
            if last == h or starts[last + 1] - starts[first] > _TERMS:
                groups.append((first, last, slice(starts[first], starts[last])))
                first = last
        return groups

    def _of_terms(self, weight: np.ndarray) -> np.ndarray:
        """(terms, O)."""
        i, j = self.pairs
        own = np.ascontiguousarray(weight[:, i, j].T)
        if self.symmetric:
            own[i < j] += weight[:, j, i].T[i < j]
        return own

    def _products(self, group: tuple[int, int, slice], x: np.ndarray, x0: np.ndarray) -> Any:
        first, last, terms = group
        p = np.empty((terms.stop - terms.start, x.shape[1]), x.dtype)
        _products_cpu(x, x0, first, last, self.symmetric, p)
        return rounded(p, self.amp)

    def backward(self, dy):
        rows, outputs = dy.shape
        dx, dx0 = arrays.empty(self.x.shape, dy.dtype), arrays.empty(self.x0.shape, dy.dtype)
        size = self.size * max(1, -(-rows // (_PARTS * self.size)))  # of so many blocks
        weight_parts = np.zeros((-(-rows // size), *self.weight.shape), dy.dtype)
        bias_parts = np.zeros((len(weight_parts), outputs), dy.dtype)

        def part(start: int, stop: int) -> None:
            for i in range(start, stop, self.size):
                j, n = min(i + self.size, stop), start // size
                dz = np.array(dy[i:j])
                if not self.linear_output:
                    _mask_cpu(dz, self.y[i:j])
                dz = rounded(dz, self.amp)
                bias_parts[n] += dz.sum(axis=0)
                self._sum(i, j, dz, dx[i:j], dx0[i:j], weight_parts[n])

        with cpu.serial_blas():
            cpu.parallel(part, rows, size)
        dweight = self.grad_room(2)
        self._give(weight_parts.sum(axis=0), dweight)
        return dx, dx0, dweight, bias_parts.sum(axis=0)

    def _give(self, of_terms, dweight):
        """Write the gradient of the weight, given that of what `_take` kept."""
        i, j = self.pairs
        dweight[:, i, j] = of_terms.T
        if self.symmetric:
            dweight[:, j, i] = of_terms.T

    def _sum(self, i, j, dz, dx, dx0, dweight):
        """Write dx and dx0 of rows i to j, and add to the gradient of what `_take` kept."""
        given = _turned(self.x[i:j]), _turned(self.x0[i:j])
        sums, turned = [np.zeros_like(a) for a in given], _turned(dz)
        for group in self.groups:
            first, last, terms = group
            dweight[terms] += self._products(group, *given) @ dz
            dp = self.weight[terms] @ turned
            _sums_cpu(dp, *given, first, last, self.symmetric, *sums)
        dx[...], dx0[...] = (a.T for a in sums)


class _RectifiedInteraction(_CompressedInteraction):
    """In float32, of what is not 0 in x alone; terms and outputs are padded to whole vectors."""

    def _take(self, weight):
        outputs, h, m = weight.shape
        self.wide = -(-m // THIN_COLUMNS) * THIN_COLUMNS
        filled = -(-outputs // THIN_COLUMNS) * THIN_COLUMNS
        self.weight = np.zeros((h, self.wide, filled), weight.dtype)
        self.weight[:, :m, :outputs] = weight.transpose(1, 2, 0)
        self.turned = np.ascontiguousarray(self.weight.transpose(0, 2, 1))

    def _filled(self, x, columns):
        out = np.zeros((len(x), columns), x.dtype)
        out[:, : x.shape[1]] = x
        return out

    def _multiply(self, i, j, y):
        z = np.zeros((len(y), self.weight.shape[2]), y.dtype)
        x0 = self._filled(self.x0[i:j], self.wide)
        live_products_cpu(self.x[i:j], x0, self.weight, self.x0.shape[1], z)
        y[...] = z[:, : y.shape[1]]

    def _sum(self, i, j, dz, dx, dx0, dweight):
        x0 = self._filled(self.x0[i:j], self.wide)
        dz, sums = self._filled(dz, self.weight.shape[2]), np.zeros_like(x0)
        live_sums_cpu(dz, self.x[i:j], x0, self.turned, self.x0.shape[1], dx, sums, dweight)
        dx0[...] = sums[:, : dx0.shape[1]]

    def _give(self, gradient, dweight):
        outputs, _, m = dweight.shape
        dweight[...] = gradient[:, :m, :outputs].transpose(2, 0, 1)


def _products_geometry(n: int) -> Geometry:
    return Geometry(blocks(n, 256), 256)


_products = Kernel(
    "compressed_interaction.cu", "compressed_products",
    "const float* x, const float* x0, value_t* p, int64_t count", _products_geometry,
)  # fmt: skip
_sums = Kernel(
    "compressed_interaction.cu", "compressed_sums",
    "const float* dp, const float* x, const float* x0, float* dx, float* dx0, int64_t rows",
    lambda B: Geometry(blocks(B, 8), 256),
)  # fmt: skip


def _macros(x: Any, x0: Any, dtype: Any) -> dict[str, object]:
    h, m = x.shape[1], x0.shape[1]
    columns = min(4, blocks(m, 32))
    filled = h * m if dtype == np.float32 else padded_width(h * m)
    sizes = {"H": h, "M": m, "FILLED": filled, "COLUMNS": columns, "SPAN": 32 * columns}
    return sizes | value_macros(dtype)


def compressed_products(x: Any, x0: Any, dtype: Any) -> Any:
    """Return the products p of contiguous x (R, H) and x0 (R, M), on devices padded as `padded`.

    Examples
    --------
    >>> compressed_products(np.array([[2.0, 3.0]]), np.array([[1.0, 10.0]]), np.float64)
    array([[ 2., 20.,  3., 30.]])
    """
    xp, dtype = arrays.namespace(_NAME, x, x0), np.dtype(dtype)
    if xp is np:
        p = (x[:, :, None] * x0[:, None, :]).reshape(len(x), -1)
        return p if p.dtype == dtype else padded(p, dtype)
    macros = _macros(x, x0, dtype)
    p = xp.empty((len(x), macros["FILLED"]), dtype)
    vector = vector_width(p.shape[1], p)
    n = p.size // vector
    _products(x, x0, arrays.bits(p), p.size, macros=macros | {"VECTOR": vector}, n=n)
    return p


def compressed_sums(dp: Any, x: Any, x0: Any, dx: Any, dx0: Any) -> None:
    """Write the gradients of x and x0, given that of their products (R, H M).

    Examples
    --------
    >>> x, x0, dx, dx0 = np.ones((1, 2)), np.ones((1, 3)), np.empty((1, 2)), np.empty((1, 3))
    >>> compressed_sums(np.ones((1, 6)), x, x0, dx, dx0)
    >>> dx, dx0
    (array([[3., 3.]]), array([[2., 2., 2.]]))
    """
    if arrays.namespace(_NAME, dp, x, x0, dx, dx0) is np:
        dp = dp.reshape(len(x), x.shape[1], -1)
        dx[...], dx0[...] = np.einsum("rij,rj->ri", dp, x0), np.einsum("rij,ri->rj", dp, x)
    else:
        macros = _macros(x, x0, dp.dtype) | {"VECTOR": 1}
        _sums(dp, x, x0, dx, dx0, len(x), macros=macros, B=len(x))


class _CompressedInteractionOnDevice(Function):
    def forward(self, x, x0, weight, bias, linear_output, amp):
        self.linear_output = linear_output
        self.xp = xp = arrays.namespace(_NAME, x, x0, weight, bias)
        self.x, self.x0, bias = map(xp.ascontiguousarray, (x, x0, bias))
        flat = xp.ascontiguousarray(weight).reshape(len(weight), -1)
        self.amp, self.weight = amp, flat if amp is None else cast_matrices([flat], amp)[0]
        self.shape, rows, outputs = weight.shape, len(x), len(weight)
        self.y = y = xp.empty((rows, outputs), np.float32)
        for i, j, p in self._chunks():
            cublaslt.matmul(
                p, self.weight[:outputs], y[i:j], transpose_b=True,
                epilogue=Epilogue.BIAS if linear_output else Epilogue.RELU_BIAS, bias=bias,
            )  # fmt: skip
        return y

    def _chunks(self) -> Iterator[tuple[int, int, Any]]:
        """First and last row, and products."""
        dtype = np.dtype(np.float32 if self.amp is None else self.amp)
        rows, width = len(self.x), self.weight.shape[1]
        size = max(1, _CHUNK // (width * dtype.itemsize))
        for i in range(0, rows, size):
            j = min(i + size, rows)
            yield i, j, compressed_products(self.x[i:j], self.x0[i:j], dtype)

    def backward(self, dy):
        xp, (outputs, h, m) = self.xp, self.shape
        # Not by cublasLt's mask: where no product is left z is 0, and the mask may be either.
        dz = dy if self.linear_output else xp.where(self.y > 0, dy, np.float32(0))
        dz = xp.ascontiguousarray(dz)
        if self.amp is not None:
            dz = padded(dz, self.amp)
        dx, dx0 = xp.empty(self.x.shape, np.float32), xp.empty(self.x0.shape, np.float32)
        dweight = self.grad_room(2)
        flat = dweight.reshape(outputs, h * m)
        if len(dy) == 0:
            flat[...] = 0
        for i, j, p in self._chunks():
            cublaslt.matmul(
                dz[i:j, :outputs], p[:, : h * m], flat, transpose_a=True, added=flat if i else None
            )
            dp = xp.empty((j - i, h * m), np.float32)
            cublaslt.matmul(dz[i:j], self.weight[:, : h * m], dp)
            compressed_sums(dp, self.x[i:j], self.x0[i:j], dx[i:j], dx0[i:j])
        dbias = dz[:, :outputs].astype(np.float32, copy=False).sum(axis=0)
        return dx, dx0, dweight, dbias


def compressed_interaction(
    x: Any,
    x0: Any,
    weight: Any,
    bias: Any,
    *,
    linear_output: bool = False,
    rectified: bool = False,
    amp: str | None = None,
) -> Any:
    """Return y of the formula above.

    Parameters
    ----------
    x : (R, H) array or Tensor of float32, on the CPU also float64
        Output of the layer before, or `x0`.
    x0 : (R, M) array or Tensor of the same dtype
        Input of the network: of each sample and column, the numbers of all its embeddings.
    weight : (O, H, M) array or Tensor of the same dtype
    bias : (O,) array or Tensor of the same dtype
    linear_output : bool
        Whether y goes without ReLU.
    rectified : bool
        Whether x has been through ReLU, which stops the gradient where x is 0: there it may be left
        out, and on the CPU is 0.
    amp : {None, "float16", "bfloat16"}
        What is multiplied in, see above; arrays are then float32.

    Returns
    -------
    (R, O) array or Tensor

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, or no column or output.

    Notes
    -----
    Lian et al. 2018, "xDeepFM", equation 6; ReLU is of its authors' code.

    Examples
    --------
    >>> x, x0 = np.array([[2.0, 3.0]]), np.array([[1.0, 10.0]])
    >>> compressed_interaction(x, x0, np.array([[[1.0, 0.0], [0.0, -1.0]]]), np.array([29.0]))
    array([[1.]])
    """
    raw = [a.data if isinstance(a, Tensor) else a for a in (x, x0, weight, bias)]
    xp = arrays.namespace(_NAME, *raw)
    half = half_type(_NAME, amp)
    floats = (np.float32, np.float64) if xp is np and half is None else (np.float32,)
    errors.same_dtype(_NAME, *floats, x=raw[0], x0=raw[1], weight=raw[2], bias=raw[3])
    sizes = errors.axes(
        _NAME, x=(raw[0], "R H"), x0=(raw[1], "R M"), weight=(raw[2], "O H M"),
        bias=(raw[3], "O"),
    )  # fmt: skip
    if 0 in sizes[1:]:
        raise ValueError(f"{_NAME}: O, H and M must be at least 1, got shape {raw[2].shape}.")
    op = _CompressedInteraction if xp is np else _CompressedInteractionOnDevice
    if rectified and xp is np and half is None and raw[0].dtype == np.float32:
        op = _RectifiedInteraction
    return op.apply(x, x0, weight, bias, linear_output=linear_output, amp=half)
