"""Collection of blocks from scrapes, for analyses and for the calibration."""
