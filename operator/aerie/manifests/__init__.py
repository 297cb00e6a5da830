"""Builders of the objects that Aerie manages for a resource: pure functions from the resource to plain dictionaries.

    naming                  labels, selectors and names
    revision_hash           the fields of the resource that determine a pod
    pod/engine_pod          the pod template of the engine
    pod/strategic_merge     the user's podTemplate merged over it
    pod/pod_template_policy the fields that podTemplate must keep
    pod/placement           the scheduling preference of control pods
    deployment              Deployment and PodDisruptionBudget
    network                 Services and the HTTPRoute
    preflight_job           the Job that inspects the checkpoints before a GPU is requested
    preflight_environment   variables and volumes that the Job inherits from the engine's pod
    calibration_config_map  the ConfigMap of the baseline calibration
    plugin_config_map       the ConfigMap with the plugin of vLLM for changes of the drafter in place
    rollout_history_config_map  the ConfigMap of the records of rollouts
    tuning_config_map       the ConfigMap of the tuning record
    apply_diff              whether a live object differs from what was applied

Guarantee: the same input gives the same object, ready for server-side apply. Nothing here reads a clock or the network.
"""
