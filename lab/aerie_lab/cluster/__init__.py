"""A lab as a whole: its folder and certificates, its start and end, and the `Lab` that callers use."""

from aerie_lab.cluster.folder import list_lab_names
from aerie_lab.cluster.lab import Lab, take_down_lab
from aerie_lab.settings import LabSettings

__all__ = ["Lab", "LabSettings", "list_lab_names", "take_down_lab"]
