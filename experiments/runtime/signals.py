"""Signals ask for a stop; the training loop answers at the next step boundary.

A handler only sets a flag: saving inside it could land anywhere in a step, on one rank alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType, SimpleNamespace

#: The signal that asked for a stop; the process that handles signals; whether `answer` raises.
NOW = SimpleNamespace(reason=None, pid=None, answers=False)
NAMES = ("SIGINT", "SIGTERM", "SIGUSR2")


class Asked(Exception):
    """The signal `reason` asked for a stop, at a place that can be left (see `answered`)."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} asked for a stop")
        self.reason = reason


@contextlib.contextmanager
def answered(now: bool = True) -> Iterator[None]:
    """Let `answer` raise inside the block: what is done there can be done again."""
    held, NOW.answers = NOW.answers, now
    try:
        yield
    finally:
        NOW.answers = held


def answer() -> None:
    """Raise `Asked` inside `answered` if a stop was asked for; it costs nothing otherwise."""
    if NOW.answers and NOW.reason is not None:
        raise Asked(NOW.reason)


def requested() -> str | None:
    """Return the name of the signal that asked for a stop, or None."""
    return NOW.reason


def request(reason: str) -> None:
    """Ask for a stop as a signal would."""
    NOW.reason = reason


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != NOW.pid:
        # A forked worker inherited this handler; the parent got the signal too.
        return
    name = signal.Signals(number).name
    if name == "SIGINT" and NOW.reason is not None:
        # Whatever asked first: a person who presses Ctrl-C again wants an end now.
        raise KeyboardInterrupt
    if NOW.reason is None:
        NOW.reason = name
        if name == "SIGINT":
            said = "stopping after this step and a save; press Ctrl-C again to stop at once"
            os.write(2, f"\n{said}\n".encode())


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGUSR2 inside the block; put the old handlers back after it.

    A block inside another one leaves handlers and what was asked for to the outer one: a signal
    that came between the two must not be forgotten.
    """
    if NOW.pid == os.getpid():
        yield
        return
    NOW.reason, NOW.pid = None, os.getpid()
    held = {}
    for number in (getattr(signal, name) for name in NAMES if hasattr(signal, name)):
        # Only the main thread may set handlers; a notebook's worker thread goes without.
        with contextlib.suppress(ValueError):
            held[number] = signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        NOW.pid = None
