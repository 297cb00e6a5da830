"""A lab as a whole: its folder and certificates, its start and end, and the `Lab` that callers use."""

from aerie_lab.cluster.folder import names
from aerie_lab.cluster.lab import Lab, take_down
from aerie_lab.settings import Settings

__all__ = ["Lab", "Settings", "names", "take_down"]
