"""Decide how a change of a resource is rolled out: pure functions from a snapshot to a plan.

    reconcile      the decision about one resource, from the snapshot to the plan
    plan           the result: objects to apply and delete, status, events, requeue delay
    conditions     the conditions of the status, their times and events

    facts/         the snapshot of one resource, and what is read from its pods, routes and metrics
    revision/      the desired revision, its drafter, its pod template and its preflight result
    capacity/      replicas and traffic weight of each arm, and the order in which both change
    canary/        one step of a canary or of post-promotion monitoring
    progression/   which revisions have pods, and the condition Progressing
    trials/        the effective speculation setting and its trials
    children/      the objects that have to exist
    status/        the status, its hold conditions, its notifications and its metrics

Guarantee: nothing here reads a clock, the network or a random source. All that has to survive a crash is in the status.
"""
