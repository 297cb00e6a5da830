"""Which speculation setting an engine should have, from what its replicas count: pure functions of telemetry and a seed.

    telemetry     windows of all replicas, reduced to bounded cells and blocks; what is left out, and why
    acceptance    survival by position with its uncertainty, and beyond the positions that were drafted
    steptime      seconds of an engine step by batch and drafted tokens: a fit, or why there is none
    candidates    settings that version, model runner, parallelism and captured graphs allow, and why not the others
    forecast      what each candidate would give on the load that was seen
    policy        when a forecast is good enough to act on, and when a canary is worth its cost
    decide        from telemetry to a decision
    explain       the decision in words

Principle: the engine adapts from step to step; what it may do is chosen here, from minutes to hours of metrics. A forecast is
never a proof: a chosen setting is a candidate for a canary.

Guarantees: nothing here reads a clock, the network or a random source; the same telemetry and seed give the same decision. Where
the data do not identify what is asked for, the answer is a sentence that says what is missing. Not guaranteed: that the future
load is like the past one, or that a cost which no regressor names (long contexts, another process on the GPU) stays as it is.

Nothing is imported here, because numpy alone takes 16 MiB: who tunes imports the module, and who does not never pays.
"""
