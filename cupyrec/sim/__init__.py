"""CUDA kernels without a GPU: NVRTC's PTX executed, checked and counted, thread by thread.

`run` takes anyone's kernel. What it says: the results, the faults (accesses out of bounds,
misaligned or of bytes nothing wrote, races, barriers that some threads never reach), and counts of
sectors, bank conflicts and instructions, which are the same on every run.

The package is also the array module of the device ``sim``, with NumPy's and CuPy's names.
"""

from cupyrec.sim import cuda
from cupyrec.sim.array import FUNCTIONS, array, asarray, asnumpy, empty, ndarray
from cupyrec.sim.launch import Result, run
from cupyrec.sim.machine import Fault
from cupyrec.sim.ptx import PtxError
from cupyrec.sim.recorder import Record, record, schedule

__all__ = [
    "FUNCTIONS", "Fault", "PtxError", "Record", "Result", "array", "asarray", "asnumpy", "cuda",
    "empty", "ndarray", "record", "run", "schedule",
]  # fmt: skip

globals().update(FUNCTIONS)  # where, exp, …
