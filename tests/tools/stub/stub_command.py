"""Commands that are no training: they write their words, return codes, or get signals."""

import json
import os
import signal
import time
from pathlib import Path


def main(words):
    Path(words[1]).parent.mkdir(parents=True, exist_ok=True)
    Path(words[1]).write_text(json.dumps(words))
    return 0


def seven(words):
    return 7


def nothing(words):
    return 0


def usr2(words):
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(5)


def term(words):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
