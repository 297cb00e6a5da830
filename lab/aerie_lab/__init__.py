"""The lab: a real Kubernetes control plane and gateway on one Linux machine, without a container engine.

It exists so that every capability of Aerie is proven against the real API server, scheduler and Envoy, and so that a
user without a GPU cluster can try it. It is not a cluster to keep anything on: data is not synced to disk, pods are
local processes of one machine, and nothing isolates a pod from the user who runs the lab.
"""
