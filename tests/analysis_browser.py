"""A real headless Chromium, driven through its debugging pipe (two file descriptors; no port, no network)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

import pytest

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--disable-background-networking",
    "--disable-component-update", "--disable-default-apps", "--disable-extensions", "--disable-sync", "--no-first-run",
    "--disable-dev-shm-usage", "--no-default-browser-check", "--host-resolver-rules=MAP * ~NOTFOUND", "--mute-audio",
    "--disable-features=OptimizationHints,MediaRouter,Translate",
]  # fmt: skip


def find():
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


needed = pytest.mark.skipif(find() is None, reason="no Chromium on PATH (apt-get install --no-install-recommends chromium)")


class Browser:
    """One page of one browser.

    `errors` holds console errors and uncaught exceptions, `requests` every URL that was asked for.
    """

    def __init__(self):
        self.errors, self.requests, self._number, self._replies, self._buffer = [], [], 0, {}, b""
        self._profile = tempfile.mkdtemp()
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to 4.
        command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "browser", find(), *FLAGS]
        command += [f"--user-data-dir={self._profile}", "--window-size=1280,900", "about:blank"]
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), **silent)
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._wait(self._number)

    def _wait(self, number, seconds=60):
        end = time.monotonic() + seconds
        while number not in self._replies:
            if not select.select([self._in], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(f"the browser did not answer in {seconds} s")
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise RuntimeError("the browser ended")
            *whole, self._buffer = (self._buffer + piece).split(b"\0")
            for text in whole:
                self._take(json.loads(text))
        reply = self._replies.pop(number)
        if "error" in reply:
            raise RuntimeError(reply["error"]["message"])
        return reply["result"]

    def _take(self, message):
        if "id" in message:
            self._replies[message["id"]] = message
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] in ("error", "warning"):
            self.errors.append(message["params"]["entry"]["text"])
        elif message["method"] == "Runtime.consoleAPICalled" and message["params"]["type"] in ("error", "warning"):
            self.errors.append(str(message["params"]["args"]))
        elif message["method"] == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])

    def run(self, script):
        """Evaluate JavaScript and return its value."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def open(self, path, ready="document.readyState === 'complete'", seconds=60, fragment=""):
        """Open a file and wait until the expression `ready` is true."""
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        end = time.monotonic() + seconds
        while True:
            # Between two documents there is nothing to evaluate in.
            with contextlib.suppress(RuntimeError):
                if self.run(f"Boolean({ready})"):
                    return
            if time.monotonic() > end:
                raise TimeoutError(f"{path} was not ready in {seconds} s")
            time.sleep(0.1)

    def resize(self, width, height=900):
        """Become a window of this size, or the screen of a phone."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **screen)

    def close(self):
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)
