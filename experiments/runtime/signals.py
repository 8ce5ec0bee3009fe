"""Signals request a stop; the training loop stops at the next step boundary.

A handler only sets a flag: saving inside it could happen anywhere in a step, on one rank alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, SimpleNamespace

#: The signal that requested a stop; the process that handles signals; whether `check` raises.
STATE = SimpleNamespace(reason=None, pid=None, interruptible=False)
NAMES = ("SIGINT", "SIGTERM", "SIGUSR2")


class StopRequested(Exception):
    """The signal `reason` requested a stop inside an `interruptible` block."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} requested a stop")
        self.reason = reason


@contextlib.contextmanager
def interruptible(enabled: bool = True) -> Iterator[None]:
    """Let `check` raise inside the block, whose work can be repeated after a resume."""
    previous, STATE.interruptible = STATE.interruptible, enabled
    try:
        yield
    finally:
        STATE.interruptible = previous


def check() -> None:
    """Raise `StopRequested` if a signal requested a stop inside an `interruptible` block."""
    if STATE.interruptible and STATE.reason is not None:
        raise StopRequested(STATE.reason)


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != STATE.pid:
        # A forked worker inherited this handler; the parent got the signal too.
        return
    name = signal.Signals(number).name
    if name == "SIGINT" and STATE.reason is not None:
        # A second Ctrl-C, or one after another signal, stops at once.
        raise KeyboardInterrupt
    if STATE.reason is None:
        STATE.reason = name
        if name == "SIGINT":
            message = "stopping after this step and a save; press Ctrl-C again to stop at once"
            os.write(2, f"\n{message}\n".encode())


@contextlib.contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None], names: Sequence[str]
) -> Iterator[None]:
    """Install a handler of signals inside the block; restore the old handlers after it."""
    previous = {}
    for name in names:
        # Windows has no SIGUSR2; only the main thread may set handlers, not one of a notebook.
        with contextlib.suppress(AttributeError, ValueError):
            number = getattr(signal, name)
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGUSR2 inside the block; restore the old handlers after it.

    A nested block leaves handlers and requests to the outer one: a signal that arrives between the
    two must not be lost.
    """
    if STATE.pid == os.getpid():
        yield
        return
    STATE.reason, STATE.pid = None, os.getpid()
    try:
        with handled_by(_handle, NAMES):
            yield
    finally:
        STATE.pid = None
