"""A notification endpoint for the lab's network: prints its port and appends each posted notification to a file."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Receiver(BaseHTTPRequestHandler):
    """Accepts complete requests."""

    turn = threading.Lock()

    def do_POST(self) -> None:
        """Append a notification; an incomplete one, from an operator that was killed meanwhile, is dropped."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if len(body) < int(self.headers["Content-Length"]):
            return
        with self.turn, Path(sys.argv[1]).open("ab") as file:
            file.write(body + b"\n")
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        print(server.server_address[1], flush=True)  # noqa: T201 - the answer
        server.serve_forever()
