"""The thread that ends the process if the main thread does not: its waiting time and the exit code."""

from __future__ import annotations

import os
import signal

import pytest

from mhacli.io import interrupts


class Ended(Exception):
    """Instead of the end of the process."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_process_ends_with_the_code_of_the_signal_and_other_signals_are_none_of_it(number, code, monkeypatch):
    def ended(status):
        raise Ended(status)

    monkeypatch.setattr(interrupts, "GRACE_S", 0.0)
    monkeypatch.setattr(os, "_exit", ended)
    reading, writing = os.pipe()
    os.write(writing, bytes([signal.SIGWINCH, signal.SIGCHLD, number]))
    with pytest.raises(Ended) as caught:
        interrupts._end_in_time(reading)
    os.close(reading)
    os.close(writing)
    assert caught.value.args == (code,)


def test_an_interruption_waits_for_the_end_of_a_block_that_is_not_to_be_interrupted():
    steps = []

    def work():
        with interrupts.uninterrupted(60.0):
            for step in ("one", "two"):
                signal.raise_signal(signal.SIGINT)
                steps.append(step)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["one", "two"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interruption_that_has_waited_long_enough_is_raised_within_the_block():
    steps = []

    def work():
        with interrupts.uninterrupted(0.0):
            signal.raise_signal(signal.SIGTERM)
            steps.append("behind the signal")

    before = signal.signal(signal.SIGTERM, interrupts._terminate)
    try:
        with pytest.raises(interrupts.Terminated):
            work()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert steps == []
