"""A rank that fails ends the job within 30 s, and all ranks say where they stood."""

import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from job import job, launch

from cupyrec.parallel import Communicator, failed, failure, world
from cupyrec.parallel.failure import Position

OTHER = "rank 0 of 2 got SIGTERM in 'rows' (call 7) at step 3"


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("raise ValueError('of a kind')", 1, "after 'keys' (call 6) at step 3: ValueError: of a"),
        ("raise KeyboardInterrupt", 130, "after 'keys' (call 6) at step 3: KeyboardInterrupt"),
        (
            "threading.Thread(target=lambda: 1 / 0).start(); time.sleep(60)", 1,
            "after 'keys' (call 6) at step 3: ZeroDivisionError: division by zero",
        ),
        (
            "ranks.submit('dense', lambda: 1 / 0).result()", 1,
            "after 'dense' (call 7) at step 3: ZeroDivisionError: division by zero",
        ),
    ],
)  # fmt: skip
def test_what_nobody_catches_ends_all_ranks(
    tmp_path: Path, fault: str, code: int, cause: str
) -> None:
    ended = job(tmp_path, fault)
    assert ended.code == code
    assert ended.seconds < 60
    assert f"rank 1 of 2 failed {cause}" in ended.err
    assert "Traceback" in ended.err
    assert OTHER in ended.err
    assert "is through" not in ended.out


def test_the_command_ends_all_ranks_with_its_exit_code(tmp_path: Path) -> None:
    ended = job(tmp_path, "import cupyrec.cli; cupyrec.cli._fail(OSError('no file'), 3)")
    assert (ended.code, ended.seconds < 60) == (3, True)
    assert "rank 1 of 2 failed after 'keys' (call 6) at step 3: OSError: no file\n" in ended.err


def test_what_all_ranks_fail_by_is_told_once(tmp_path: Path) -> None:
    usage = "import cupyrec.cli; cupyrec.cli._fail(cupyrec.cli.UsageError('no option'), 2)"
    ended = job(tmp_path, f"pass\n    {usage}")
    assert (ended.code, ended.seconds < 60) == (2, True)
    assert ended.err.count("no option") == 1
    assert "rank 0 of 2 failed after 'keys' (call 6) at step 3: UsageError: no option" in ended.err
    assert "rank 1 of 2 got SIGTERM after 'keys' (call 6) at step 3, failing by Usage" in ended.err


def test_an_interruption_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    ended = job(tmp_path, "pass\n    raise KeyboardInterrupt('a wish')")
    assert (ended.code, ended.seconds < 60) == (130, True)
    assert ended.err.count("Traceback") == 1
    assert "rank 0 of 2 failed after 'keys' (call 6) at step 3: KeyboardInter" in ended.err
    assert "rank 1 of 2 got SIGTERM after 'keys' (call 6) at step 3, failing by Keyb" in ended.err


def test_the_command_tells_an_interruption_of_all_ranks_once(tmp_path: Path) -> None:
    told = (
        "import cupyrec.cli, cupyrec.commands\n"
        "def stop(options): raise KeyboardInterrupt('stopped after step 3')\n"
        "cupyrec.commands.evaluate = stop\n"
        "cupyrec.parallel.world()\n"
        "sys.exit(cupyrec.cli.main(['evaluate', 'a run', '--data', 'some']))"
    )
    ended = launch(tmp_path, f"import sys\n{told}", 2)
    assert ended.returncode == 130
    assert ended.stderr.count("cupyrec: stopped after step 3\n") == 1


def test_a_rank_that_sends_more_than_is_expected_is_told_of(tmp_path: Path) -> None:
    """By another codec, say."""
    fault = (
        "pass\n"
        "    import numpy as np\n"
        "    from cupyrec.parallel import Transfer\n"
        "    sent = [1 + 8 * ranks.rank, 0]\n"
        "    given = np.zeros(sum(sent)), sent, np.empty(2 - 2 * ranks.rank), [1, 1]\n"
        "    ranks.all_to_all('rows', Transfer(*given))"
    )
    ended = job(tmp_path, fault)
    assert (ended.code, ended.seconds < 60) == (1, True)
    assert "failed after 'rows' (call 7) at step 3: RuntimeError: rows: all ranks must" in ended.err


def test_a_failure_is_told_where_it_happened(tmp_path: Path) -> None:
    """And its exit code is the job's, though the other ranks fail as well."""
    work = "lambda: 1 // (ranks.rank - 1)"
    ended = job(tmp_path, f"pass\n    ranks.together('open', {work})")
    assert ended.code == 1
    assert "rank 1 of 2 failed after 'open' (call 7) at step 3: ZeroDivisionError" in ended.err
    assert ended.err.count("Traceback") == 1
    assert "OtherRankError: open" not in ended.err


@pytest.mark.parametrize("context", ["contextlib.nullcontext()", "interruption()"])
def test_others_of_a_killed_rank_say_where_they_stood(tmp_path: Path, context: str) -> None:
    """Within `interruption` as well, which takes SIGTERM for a wish."""
    ended = job(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", context=context)
    assert ended.code == 128 + signal.SIGKILL
    assert ended.seconds < 60
    assert OTHER in ended.err


def test_mpirun_passes_a_wish_on_to_all_ranks(tmp_path: Path) -> None:
    """As it does neither Ctrl-C nor SIGTERM, at which it kills them."""
    fault = (
        "pass\n"
        "    ranks.barrier('both listen')\n"
        "    if ranks.rank == 1:\n"
        "        os.kill(os.getppid(), signal.SIGUSR1)\n"
        "    while not wishes:\n"
        "        time.sleep(.01)\n"
        "    print('rank', ranks.rank, 'heard', *wishes)"
    )
    ended = job(tmp_path, fault, context="interruption() as wishes")
    assert ended.code == 0
    assert sorted(line for line in ended.out.splitlines() if "heard" in line) == [
        "rank 0 heard SIGUSR1", "rank 1 heard SIGUSR1",
    ]  # fmt: skip
    assert ended.seconds < 60


def test_a_forked_child_is_no_rank(tmp_path: Path) -> None:
    fault = (
        "child = os.fork()\n"
        "        if not child:\n"
        "            sys.excepthook(ValueError, ValueError('of a child'), None)\n"
        "            os._exit(7)\n"
        "        print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    ended = job(tmp_path, fault)
    assert ended.code == 0
    assert "child 7\n" in ended.out
    assert ended.out.count("is through") == 2
    assert ended.err == "ValueError: of a child\n"


def test_one_rank_changes_nothing() -> None:
    if world().size == 1:
        assert failed(ValueError("of one")) is None
        hooks = sys.excepthook, threading.excepthook  # which may be another library's
        assert not [hook for hook in hooks if hook.__module__.startswith("cupyrec")]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_positions_tell_step_call_and_state() -> None:
    ranks = Communicator()
    assert str(Position.of(ranks)) == "before any call at step 0"
    ranks.step, ranks.calls, ranks.last = 3, 8, "rows"
    assert str(Position.of(ranks)) == "after 'rows' (call 8) at step 3"
    ranks.now = "rows"
    assert str(Position.of(ranks)) == "in 'rows' (call 8) at step 3"
    ranks.now = None
    with ranks.busy("saving"), ranks.busy("reading"), ranks.busy("reading"):
        assert str(Position.of(ranks)) == "after 'rows' (call 8) at step 3, saving, reading"
    ended = Position.of(ranks)._replace(ended=True)
    assert str(ended) == "after 'rows' (call 8) at step 3, its program has ended"


def test_lines_are_written_whole(capfd) -> None:
    failure.say("ä" * 10_000)
    assert capfd.readouterr().err == "ä" * 10_000 + "\n"


def test_a_deadline_ends_the_process_whatever_python_does() -> None:
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with failure.deadline(0.1):
            signal.sigwait([signal.SIGUSR1])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 256
    for seconds in (60, math.inf):
        with failure.deadline(seconds):
            pass


def test_a_deadline_that_was_kept_ends_nothing() -> None:
    child = os.fork()
    if not child:
        for message in ("", "too late"):
            with failure.deadline(3, message):
                pass
        time.sleep(5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_deadline_says_what_was_not_done(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        os.dup2(os.open(tmp_path / "told", os.O_WRONLY | os.O_CREAT), 2)
        with failure.deadline(0.1, "too late"):
            time.sleep(60)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 256
    assert (tmp_path / "told").read_text() == "too late\n"
