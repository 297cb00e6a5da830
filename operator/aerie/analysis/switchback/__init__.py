"""Compares two drafters by turns in the same pods: a switchback experiment.

    design       which pod drafts with which drafter in which window; lengths of windows and of their wash-out
    carryover    what a drafter can leave behind for the next one, and how much of an effect that can hide
    sign_flip    the anytime-valid test: exact by the random order alone
    plan         the criteria with their alphas and limits; fixed when a trial begins
    state        the counts so far, and the change by each further window
    verdict      the verdict after each closed pair of windows, with its message

Pods, nodes, tenants and hours differ by percents. A comparison between pods needs a history to know by how much. Here each pod
is compared with itself, minutes apart, in an order that is drawn. What differs between pods cancels, whatever it is, so no
history is needed and one pod suffices.

Guarantees: those of `sign_flip`. Every function is pure: the same windows give the same state, in whatever order they arrive,
and a window that is added twice counts once.
Not guaranteed: a carry-over that lasts longer than the plan's `carryover_seconds` may hide a part of an effect.
"""
