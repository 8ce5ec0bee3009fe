import http.server
import threading

import pytest


@pytest.fixture
def server(tmp_path_factory):
    """A folder, and the address under which its files can be downloaded."""
    served = tmp_path_factory.mktemp("served")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *words):
            super().__init__(*words, directory=str(served))

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield served, f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
