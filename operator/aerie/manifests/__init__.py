"""Builders of the objects that Aerie keeps for a resource: pure functions from the resource to plain dictionaries.

    names       labels, selectors and names
    revision    which fields of the resource determine a pod
    merge       the user's podTemplate over the pod that Aerie builds
    protect     what that has to leave as it is
    pod         the engine's pod
    workload    Deployment and PodDisruptionBudget
    network     Services and the HTTPRoute
    preflight   the Job that looks at the checkpoints before a GPU is asked for
    drift       whether a live object still is what was applied

Guarantee: the same input gives the same object, ready for server-side apply; nothing here reads a clock or the network.
"""
