"""What messages need of arrays."""

import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.kernel import KernelFault
from cupyrec.ops.rank_sum import rank_sum
from cupyrec.parallel import devices


def test_the_simulator_is_told_what_others_have_written(sim) -> None:
    parts = sim.empty((2, 3), np.float32)
    with pytest.raises(KernelFault, match="uninitialized"):
        rank_sum(parts)
    devices.received(parts)
    assert arrays.to_host(rank_sum(parts)).shape == (3,)


@pytest.mark.parametrize("shape", [(0,), (3, 2)])
def test_host_memory_has_the_shape_asked_for(np_or_xp, shape) -> None:
    like = np_or_xp.zeros(shape, np.int64)
    host = devices.pinned_like(like)
    assert isinstance(host, np.ndarray) and (host.shape, host.dtype) == (shape, np.int64)


def test_an_event_is_to_be_waited_for_on_a_gpu_alone(np_or_xp) -> None:
    event = devices.event(np_or_xp)
    assert (event is None) == (arrays.name(np_or_xp) != "cuda")
