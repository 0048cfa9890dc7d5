import os
import signal
import threading

import pytest

from cupyrec.interruption import ending, held, interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_a_wish_the_second_an_order(number, capfd):
    before = signal.signal(number, obey)
    try:
        with interruption() as interrupted:
            assert interrupted == []
            os.kill(os.getpid(), number)
            assert interrupted == [signal.Signals(number).name]
            assert capfd.readouterr().err == "\nstopping after this step\n"
            with pytest.raises(Obeyed):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) is obey
    finally:
        signal.signal(number, before)


class Obeyed(Exception):
    pass


def obey(number, frame):
    raise Obeyed


def test_handlers_are_as_before_after_an_error_too():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="within"):
        with interruption():
            assert signal.getsignal(signal.SIGINT) is not before
            raise RuntimeError("within")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and background shells do
    try:
        with interruption() as interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert interrupted == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_may_use_it_too():
    seen = []

    def work():
        with interruption() as interrupted:
            seen.append(interrupted)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[]]


def test_held_until_the_end_even_where_that_is_an_error():
    done, before = [], signal.signal(signal.SIGINT, obey)

    @held()
    def change(error=None):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        done.append(error)
        if error:
            raise error

    try:
        for error in (None, ValueError()):
            with pytest.raises(Obeyed):
                change(error)
            assert signal.getsignal(signal.SIGINT) is obey
        with interruption() as interrupted:
            change()
            assert interrupted == ["SIGINT"]
        assert len(done) == 3
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        change()
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_is_held_in_another_thread():
    before, seen = signal.getsignal(signal.SIGINT), []

    @held()
    def change():
        seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=change)
    thread.start()
    thread.join()
    assert seen == [before]


def test_what_is_ignored_does_not_end_a_context():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with ending():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_ends_by_no_signal():
    entered = []

    def enter():
        with ending():
            entered.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.SIG_DFL]
