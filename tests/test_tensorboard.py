"""What TensorBoard is told of a run, read back from the files."""

import struct
import sys

import numpy as np
import pytest
import trial

import cupyrec
from cupyrec import models
from cupyrec.parallel import Communicator, world
from cupyrec.run_folder import RunFolder
from cupyrec.tensorboard import TensorBoard

NEEDED = "tensorboardX is missing: pip install cupyrec[tensorboard]"


@pytest.fixture(autouse=True)
def events(request):
    """TensorBoard's record of events, of the extra."""
    if request.node.name != "test_what_is_missing_is_said":
        pytest.importorskip("tensorboardX", reason=NEEDED)


def read(folder):
    """[(step, {tag: value})] of the folder's events, as TensorBoard goes through them."""
    from tensorboardX import record_writer
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    told = []
    for path in sorted(folder.glob("*tfevents*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            (check,) = struct.unpack_from("<I", data, at + 12 + size)
            assert check == record_writer.masked_crc32c(data[at + 12 : at + 12 + size])
            at += size + 16
            if event.session_log.status == SessionLog.START:
                told = [(step, values) for step, values in told if step < event.step]
            elif event.summary.value:
                values = {value.tag: value.simple_value for value in event.summary.value}
                told.append((event.step, values))
    return told


def flat(line, name=""):
    """The numbers of a line of metrics by name."""
    if isinstance(line, dict):
        line = list(line.items())
    elif isinstance(line, list):
        line = list(enumerate(line))
    else:
        return {} if line is None else {name[1:]: np.float32(line)}
    return {k: v for key, part in line for k, v in flat(part, f"{name}/{key}").items()}


def test_every_number_of_every_line(tmp_path):
    lines, board = [], TensorBoard(tmp_path / "boards" / "mine")
    cupyrec.fit(
        models.DLRM(1, 2), trial.planted(200), trial.planted(50, 1), batch_size=8,
        callbacks=[lines.append, board],
    )  # fmt: skip
    told = read(tmp_path / "boards" / "mine")
    assert [step for step, _ in told] == [20, 25, 25, 25]
    for (_, values), line in zip(told, lines, strict=True):
        expected = flat({k: v for k, v in line.items() if k not in ("step", "valid_reliability")})
        assert values == expected
    assert {"loss", "lr", "epoch"} == told[0][1].keys()
    assert 0 < told[2][1]["valid_auc"] < 1
    assert (told[3][1]["tables/embedding/ids/0"], told[3][1]["tables/embedding/ids/1"]) == (40, 40)


def test_what_stands_inside_and_what_is_no_number(tmp_path):
    board = TensorBoard(tmp_path)
    line = dict(step=3, bytes_sent={"rows": 5, "keys": 7}, auc=float("nan"), text="x", a=[None, 2])
    board(line | {"curve": [[1, 2.0], [3, 4.0]]})
    ((step, values),) = read(tmp_path)
    assert np.isnan(values.pop("auc"))
    assert (step, values) == (3, {"bytes_sent/rows": 5, "bytes_sent/keys": 7, "a/1": 2})


def test_a_later_writer_replaces_steps_from_its_first_on(tmp_path):
    for steps in ([20, 40, 60], [40, 60, 80], [80]):
        board = TensorBoard(tmp_path)
        for step in steps:
            board(dict(step=step, loss=len(steps)))
    assert [(step, values["loss"]) for step, values in read(tmp_path)] == [
        (20, 3), (40, 3), (60, 3), (80, 1),
    ]  # fmt: skip


def test_the_command_goes_on_where_it_is_resumed(tmp_path):
    logs, run, boards = trial.write_logs(tmp_path), tmp_path / "run", tmp_path / "boards"
    more = ["--tensorboard", boards, "--set", "training.save_every=4", "--epochs", "3"]
    with pytest.raises(trial.Killed), trial.at_step(15, trial.kill):
        trial.train(logs, run, *more)
    before = read(boards)
    assert before[-1][0] == 10
    assert trial.command("train", *logs, *more, "--resume", run) == 0
    told, lines = read(boards), RunFolder.read_metrics(run / "metrics.jsonl")
    assert told[: len(before)] == before
    steps = [line["step"] for line in lines if "step" in line]
    assert [step for step, _ in told] == steps
    assert steps[-1] == 30


def test_the_first_rank_alone_writes(tmp_path):
    class Second(Communicator):
        rank, size = 1, 2

        def __init__(self):
            pass

    TensorBoard(tmp_path / "other", ranks=Second())(dict(step=1, loss=1.0))
    TensorBoard(tmp_path / "first", ranks=world())(dict(step=1, loss=1.0))
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        TensorBoard(tmp_path / "file")(dict(step=1, loss=1.0))


def test_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'cupyrec\[tensorboard\]'"):
        TensorBoard(tmp_path)
    out = tmp_path / "run"
    logs = trial.write_logs(tmp_path)
    assert trial.command("train", *logs, "--out", out, "--tensorboard", tmp_path / "x") == 1
    assert "needs tensorboardX" in capsys.readouterr().err
    assert not out.exists()
