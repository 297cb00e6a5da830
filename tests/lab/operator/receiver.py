"""An endpoint for notices, to be run in the lab's network: appends what is posted to a file, line by line, and says its port."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Receiver(BaseHTTPRequestHandler):
    """Takes everything that is whole."""

    turn = threading.Lock()

    def do_POST(self) -> None:
        """One notice; half of one, from an operator that was killed in mid-sentence, is none."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if len(body) < int(self.headers["Content-Length"]):
            return
        with self.turn, Path(sys.argv[1]).open("ab") as file:
            file.write(body + b"\n")
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        print(server.server_address[1], flush=True)  # noqa: T201 - the answer
        server.serve_forever()
