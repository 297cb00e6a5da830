"""Forecasts a rollout before it begins: what it ends with, and when, for a drafter with a given effect, by simulation.

    assumptions  what is assumed of requests, and where it was measured
    requests     draws requests, and what engines count of them
    turns        a trial by turns: under the traffic of users, or in an isolated pod
    pairs        a shadow evaluation of canary pods: pairs of answers
    live         an analysis of canary pods under the traffic of users: blocks
    turns_rule   the rule of aerie.analysis.switchback on arrays
    pairs_rule   the rule of aerie.analysis.paired on arrays
    outcomes     the ends of simulated rollouts, and their summary
    stages       which of these a spec asks for, one after the other

Each stage draws the counts that an operator would read, and hands them to the rule that decides a real rollout. `live` calls the
functions of aerie.analysis themselves. The other rules are repeated on arrays, a thousand rollouts at a time, and unit tests
compare them with the functions run by run. Schedules and plans come from the functions of aerie.rollout.

Guarantees: equal arguments give equal forecasts, and the effects of a stage meet the same requests. Not guaranteed: that the
requests are as assumed. Tenants, drift of the mix and failures are not simulated. Most of them delay a verdict.
"""
