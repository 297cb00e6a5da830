"""Reads the configs and headers of checkpoints from where they lie: a folder, or the Hugging Face Hub.

The pure core (`aerie.engine.checkpoint`) takes bytes; this package is the edge that fetches them, as few as it can. It stands
above the core and below the controller, because the command line and a preflight Job both read with it.
"""

from __future__ import annotations

from aerie.checkpoints.folder import read_folder
from aerie.checkpoints.hub import Hub, HubError

__all__ = ["Hub", "HubError", "read_folder"]
