"""A rollout in place: the drafter changes inside running engines, and pods on trial compare it by turns with the one before.

    advance        one reconcile: observation and transition
    phases         a rollout that continues: calls, condition and next reconcile of its phase
    endings        the ends: impossible, promoted, returned
    step           what one reconcile knows of a rollout
    observation    what the state machine needs to know of the pods, the trial and a user's requests
    state_machine  which trigger leads from which phase to which
    messages       the condition Progressing in each phase
    transition     the result of one reconcile

    staging        the start: pods read the drafter, and agree on its files
    trial_pods     which pods are on trial, and when more of them join
    turns          the call that a pod on trial needs in the present window
    evidence       the counts of windows that have ended
    promotion      the drafter becomes that of every pod, in batches
    deadline       when the time of a phase is over
    return_pods    every pod comes back to the drafter that it should serve with

    trial          plan and counts of the comparison by turns
    engine_pods    the pods of the stable revision, with what they report

Guarantees: pure. The status has all that a restarted operator needs, and the calls of a plan follow from it and from what pods
report. So a process that is killed loses nothing and counts nothing twice. Before the promotion, no pod has the new drafter
without a lease. A pod's drafter is what its endpoint reports.
Not guaranteed: that a pod which does not answer returns before its lease ends.
"""
