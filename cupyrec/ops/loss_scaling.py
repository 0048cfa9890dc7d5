"""Dynamic loss scaling (Micikevicius et al. 2018): what a step makes of the scale and its counts.

    a step with finite gradients    good += 1; power_i *= beta_i
                                    from `interval` of them in a row: scale *= growth, good = 0
    another one, which is skipped   skipped += 1; stuck += scale == 1; good = 0; scale *= backoff

On a device `cupyrec.ops.clip_scale` does it in its kernel, by the same operations in float64. The
scale is rounded to float32, as which it is the loss's gradient, and stays within [1, 2^24]. Below 1
it would press gradients into float16's subnormals instead of lifting them out. 2^24 lifts 2^-48 to
what float16 just holds: gradients below that change no weight, and where parts of 32 bits overflow
at no scale, one without bound would grow until they do.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

__all__ = ["LARGEST", "LossScaling", "advance"]

LARGEST = 2.0**24


class LossScaling(NamedTuple):
    """A loss scale and its rules.

    Attributes
    ----------
    state : (6,) array of float64
        Scale, good steps in a row, steps skipped, those of them at scale 1, and beta1^n and beta2^n
        after n steps that were not skipped.
    factors : (3,) array of float32
        The scale, and after the first such step Adam's corrections 1 / (1 - beta1^n) and
        (1 - beta2^n)^-1/2.
    growth, backoff : float
    interval : int
    beta1, beta2 : float
    """

    state: Any
    factors: Any
    growth: float
    backoff: float
    interval: int
    beta1: float
    beta2: float


def advance(scaling: LossScaling, finite: bool) -> None:
    """Do on the CPU what a step does, its gradients being finite or not.

    Examples
    --------
    >>> state, factors = np.array([8.0, 0, 0, 0, 1, 1]), np.array([8, 0, 0], np.float32)
    >>> scaling = LossScaling(state, factors, 2.0, 0.5, 1, beta1=0.5, beta2=0.75)
    >>> advance(scaling, finite=False)
    >>> state
    array([4., 0., 1., 0., 1., 1.])
    >>> advance(scaling, finite=True)
    >>> state, factors
    (array([8.  , 0.  , 1.  , 0.  , 0.5 , 0.75]), array([8., 2., 2.], dtype=float32))
    """
    scale, good, skipped, stuck, power1, power2 = scaling.state.tolist()
    if finite:
        good, power1, power2 = good + 1, power1 * scaling.beta1, power2 * scaling.beta2
        if good >= scaling.interval:
            scale, good = min(scale * scaling.growth, LARGEST), 0
        scaling.factors[1:] = 1 / (1 - power1), 1 / math.sqrt(1 - power2)
    else:
        skipped, stuck, good = skipped + 1, stuck + (scale == 1), 0
        scale = max(scale * scaling.backoff, 1.0)
    scale = float(np.float32(scale))
    scaling.factors[0] = scale
    scaling.state[:] = scale, good, skipped, stuck, power1, power2
