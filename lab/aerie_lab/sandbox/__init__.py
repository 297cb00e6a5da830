"""Isolation without a container engine: Linux namespaces, a container's file system view, pod networks.

`linux` wraps the system calls, `world` creates the lab's own namespaces, `network` gives pods addresses, and
`container`/`launch`/`rootfs` start a process with a container's view of the system.
"""
