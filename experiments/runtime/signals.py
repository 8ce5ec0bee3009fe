"""Signals ask for a stop; the training loop answers at the next step boundary.

A handler only sets a flag: saving inside it could land anywhere in a step, on one rank alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

_state: dict[str, str | int | None] = {"reason": None, "pid": None}
_answering = False
NAMES = ("SIGINT", "SIGTERM", "SIGUSR2")


class Asked(Exception):
    """The signal `reason` asked for a stop, at a place that can be left (see `answered`)."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} asked for a stop")
        self.reason = reason


@contextlib.contextmanager
def answered(now: bool = True) -> Iterator[None]:
    """Let `answer` raise inside the block: what is done there can be done again."""
    global _answering
    held, _answering = _answering, now
    try:
        yield
    finally:
        _answering = held


def answer() -> None:
    """Raise `Asked` inside `answered` if a stop was asked for; it costs nothing otherwise."""
    reason = requested()
    if _answering and reason is not None:
        raise Asked(reason)


def requested() -> str | None:
    """Return the name of the signal that asked for a stop, or None."""
    return _state["reason"]  # type: ignore[return-value]


def request(reason: str) -> None:
    """Ask for a stop as a signal would."""
    _state["reason"] = reason


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _state["pid"]:
        # A forked worker inherited this handler; the parent got the signal too.
        return
    name = signal.Signals(number).name
    if name == "SIGINT" and _state["reason"] is not None:
        # Whatever asked first: a person who presses Ctrl-C again wants an end now.
        raise KeyboardInterrupt
    if _state["reason"] is None:
        _state["reason"] = name
        if name == "SIGINT":
            os.write(
                2, b"\nstopping after this step and a save; press Ctrl-C again to stop at once\n"
            )


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGUSR2 inside the block; put the old handlers back after it.

    A block inside another one leaves handlers and what was asked for to the outer one: a signal
    that came between the two must not be forgotten.
    """
    if _state["pid"] == os.getpid():
        yield
        return
    _state.update(reason=None, pid=os.getpid())
    held = {}
    for name in NAMES:
        number = getattr(signal, name, None)
        if number is not None:
            # Only the main thread may set handlers; a notebook's worker thread goes without.
            with contextlib.suppress(ValueError):
                held[number] = signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        _state["pid"] = None
