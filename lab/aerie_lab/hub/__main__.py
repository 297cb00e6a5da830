"""`python -m aerie_lab.hub FOLDER`: the Hub of the lab in FOLDER, as a component of it."""

from __future__ import annotations

import sys
from pathlib import Path

from aerie_lab.hub.checkpoints import repositories
from aerie_lab.hub.server import serve
from aerie_lab.sandbox.addresses import HUB_PORT
from aerie_lab.settings import Settings

if __name__ == "__main__":
    tables = [Path(file) for file in Settings.from_folder(Path(sys.argv[1])).images]
    with serve(repositories(tables), "0.0.0.0", HUB_PORT) as server:
        server.serve_forever()
