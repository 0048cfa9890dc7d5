import time

from cupyrec.progress import Clock, Progress


def test_progress_counts_steps_batches_and_epochs():
    progress = Progress()
    for last in (False, False, True, False):
        progress.count(last)
    assert (progress.step, progress.epoch, progress.batch) == (4, 1, 1)


def test_the_first_step_and_what_lies_between_steps_are_not_timed(monkeypatch):
    clock, now = Clock(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for seconds, samples in [(100, 10), (2, 20), (3, 30)]:
        clock.start()
        now[0] += seconds
        clock.stop(samples)
        now[0] += 1000
    assert clock.samples == 60
    assert clock.rate() == (20 + 30) / (2 + 3)
