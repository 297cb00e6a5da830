"""Refresh of a served drafter: it learns the prompts that production has now, and keeps what it knew.

    captured prompts ─► select ─► answer ─► train ─► evaluate ─► decide ─► export
    old conversations ──┘          the target's      served drafter and refreshed one, on prompts held back

    settings    fields of the settings file, with defaults
    selection   which prompts are trained on, and which are held back
    sources     captured prompts and old conversations, read from files
    decision    whether the refreshed drafter may replace the served one
    run         the steps, each with an output of its own

Guarantees: a refresh that was killed continues with the step that was not complete, with the same prompts, and rejects other
inputs. No held-back prompt, and no prompt of the same conversation, is trained on. Nothing is exported unless the new prompts
gained and the old ones, if there are any, lost less than the limit, both by confidence bounds. selection and decision are pure.

Not guaranteed: that the captured prompts are those of tomorrow; that a drafter accepted here is faster in production, which a
canary has to show. The draft vocabulary stays that of the served drafter.
"""
