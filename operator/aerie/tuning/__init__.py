"""Choose the speculation setting of an engine from what its replicas count: pure functions of telemetry and a seed.

    telemetry               windows of all replicas, reduced to bounded cells and blocks; which windows are excluded, and why
    models.acceptance       survival by position with its uncertainty, also beyond the positions that were drafted
    models.step_time        seconds of an engine step by batch and draft tokens: a fit, or why there is none
    models.change_points    when acceptance and load last changed
    decision.candidates     settings that version, model runner, parallelism and captured graphs allow, and why not the others
    decision.forecast       what each candidate would give on the load that decision.load_distribution expects
    decision.policy         when a forecast is good enough to act on, and when a canary is worth its cost
    decision.recommend      from telemetry to a decision
    decision.explain        the decision as text
    recommendation          the part of a decision that the rollout needs
    worker                  the process that decides, and its protocol

Principle: the engine adapts from step to step; its allowed setting is chosen here, from minutes to hours of metrics. A forecast
is never a proof: a chosen setting is a candidate for a canary.

Guarantees: nothing here reads a clock, the network or a random source. The same telemetry and seed give the same decision. Where
the data do not identify a quantity, the answer is a message that names what is missing. Not guaranteed: that the future load is
like the past one. Nor that a cost which no regressor names (long contexts, another process on the GPU) stays as it is.

This package imports nothing, because numpy alone takes 16 MiB: only a caller that decides loads it.
"""
