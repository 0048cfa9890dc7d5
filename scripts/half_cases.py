"""Cases of bench_kernels.py for what mixed precision adds: casts."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from kernel_inputs import Work, case, floats

from cupyrec.ops.cast import cast_array, cast_matrices


@case("cast_rows", 4096, 16)
def _cast(xp: ModuleType, batch: int, width: int) -> Work:
    x = floats(xp, batch, width)
    return Work(
        lambda: (cast_array(x, np.float16),), 6 * x.size, f"B={batch} N={width}", dtype="float16",
        naive=lambda: (x.astype(np.float16),),
    )  # fmt: skip


@case("cast_matrices", 1024)
def _cast_matrices(xp: ModuleType, batch: int, width: int) -> Work:
    xs = [floats(xp, batch, width), floats(xp, width), floats(xp, width, width)]
    return Work(
        lambda: tuple(cast_matrices(xs, np.float16)), sum(6 * x.size for x in xs),
        f"B={batch} N={width}", dtype="float16",
        naive=lambda: tuple(x.astype(np.float16) for x in xs),
    )  # fmt: skip
