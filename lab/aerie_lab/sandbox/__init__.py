"""Isolation without a container engine: Linux namespaces, a container's file system view, pod networks.

`linux` wraps the system calls, `namespaces` makes the lab's own world, `network` gives pods addresses, and
`container`/`launch`/`rootfs` start a process that sees what a container would see.
"""
