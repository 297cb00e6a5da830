"""The lab's images: which local command stands for which image reference (table.py, images.toml), and an echo server."""
