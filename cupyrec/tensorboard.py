"""A run's metrics as TensorBoard shows them."""

from __future__ import annotations

import numbers
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cupyrec import errors
from cupyrec.parallel import Communicator, world

__all__ = ["TensorBoard"]


class TensorBoard:
    """A callback of `fit` that writes the numbers of each line of metrics for TensorBoard.

    Their names are those of metrics.jsonl, with a slash before what stands inside: ``loss``,
    ``valid_auc``, ``bytes_sent/rows``, ``tables/embedding/ids/3``. They are on disk when the call
    returns. Lists of lists, ``valid_reliability``, are left to `cupyrec report`. A run that is
    resumed goes on in the same folder: what was told there of steps from its first line on,
    TensorBoard forgets.

    Parameters
    ----------
    folder : path
        Made if it doesn't exist; ``tensorboard --logdir`` takes it, or one that holds several.
    ranks : Communicator, optional
        Of which the first alone writes; by default all that the launcher started.

    Raises
    ------
    ModuleNotFoundError
        tensorboardX, of the extra ``tensorboard``, is not installed.

    Examples
    --------
    ``cupyrec.fit(model, train, valid, callbacks=[TensorBoard("boards/mine")])``
    """

    def __init__(self, folder: str | os.PathLike, *, ranks: Communicator | None = None) -> None:
        try:
            import tensorboardX  # noqa: F401  # it is missed before training, not after
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "TensorBoard: needs tensorboardX, pip install 'cupyrec[tensorboard]'."
            ) from None
        self.folder, self.ranks = Path(folder), ranks or world()
        self._file: Any = None

    def __call__(self, line: dict[str, Any]) -> None:
        """Write a line of metrics, which has a ``step``.

        Raises
        ------
        OSError
            The folder can't be written to.
        """
        if self.ranks.rank > 0:
            return
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import RecordWriter

        def write(**what: Any) -> None:
            event = Event(wall_time=time.time(), step=line["step"], **what)
            self._file.write(event.SerializeToString())

        with errors.naming(self.folder):
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                name = f"events.out.tfevents.{time.time():.6f}.cupyrec"  # read in this order
                self._file = RecordWriter(str(self.folder / name))
                write(file_version="brain.Event:2")
                write(session_log=SessionLog(status=SessionLog.START))  # forget these steps
            values = [
                Summary.Value(tag=tag, simple_value=value)
                for tag, value in _numbers("", line)
                if tag != "step"
            ]
            write(summary=Summary(value=values))
            self._file.flush()


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of all that is in a line of metrics."""
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(part for part in value if not isinstance(part, (list, tuple)))
    else:
        if isinstance(value, numbers.Real):
            yield name, float(value)
        return
    for key, part in inside:
        yield from _numbers(f"{name}/{key}" if name else str(key), part)
