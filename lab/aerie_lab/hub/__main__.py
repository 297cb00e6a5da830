"""`python -m aerie_lab.hub [FOLDER]`: the Hub of the lab in FOLDER, as its component; without FOLDER, a Hub for any cluster."""

from __future__ import annotations

import sys
from pathlib import Path

from aerie_lab.hub.checkpoints import load_repositories
from aerie_lab.hub.server import create_hub_server
from aerie_lab.sandbox.addresses import HUB_PORT
from aerie_lab.settings import LabSettings

if __name__ == "__main__":
    tables = [Path(file) for folder in sys.argv[1:] for file in LabSettings.from_folder(Path(folder)).image_tables]
    with create_hub_server(load_repositories(tables), "0.0.0.0", HUB_PORT) as server:
        server.serve_forever()
