"""Criteria that compare canary and control, and the significance a verdict needs: one table, fixed when an analysis begins.

| criterion              | rolls back when significantly       | alpha  | passes when significantly           | load | pods  |
|------------------------|-------------------------------------|--------|-------------------------------------|------|-------|
| tokens per step        | below the control's                 | 0.0125 | above control * (1 - margin)        |      | 0.3 % |
| time per output token  | mean above control * 1.02           | 0.005  | below control * 1.025 as measured,  | yes  | 1.75 %|
|                        |                                     |        | and * 1.04 whatever the pods are    |      |       |
| ... objective, if any  | share beyond it more than control's | 0.0025 | share below 1 - percentile, or      | yes  |       |
|                        | + 0.25 pp (the mean then 0.0025)    |        | below 1.1 * the control's           |      |       |
| time to first token    | mean above control * 1.10           | 0.005  | mean below control * 1.25           | yes  | 1.75 %|
| ... objective, if any  | as above                            | 0.0025 | as above                            | yes  |       |
| failed requests        | more per request (e-value)          | 0.003  | share below 2 * control + 0.5 pp    |      |       |
| ended processes        | more per pod-hour (`crash_rate`)    | 0.002  | not suspicious                      |      |       |
| abandoned requests     | share above control + 5 pp          | 0.001  | share below 2 * control + 5 pp      |      |       |
| output length          | beyond control * 0.9 to 1.1         | 0.001  | -                                   |      |       |
| truncated requests     | share off by more than 5 pp         | 0.001  | -                                   |      |       |
| preemptions            | 2 * control + 0.05 per request      | 0.001  | -                                   | yes  |       |
| greedy answers         | different more often (`equivalence`)| 0.001  | -                                   |      |       |

Alphas. Those of the rollback tests add up to 0.035, because any of them suffices; they are spent by the deadline. A promotion
needs no split, because all of its tests have to pass: each has 0.05.

"Load". The criterion is counted only in blocks in which the loads of the arms match (`load_match`). Its means are adjusted to the
control's output (`load_adjustment`). Nothing is promoted while many blocks, or the latest, are excluded for that (`verdict`),
because the blocks of an overloaded arm are excluded too.

"Pods". The assumed permanent difference of two pods of one GPU model without calibration: a standard deviation, with 3 degrees of
freedom. With calibration it is the calibrated one, and a prior of 1 degree of freedom at 1 %. For tokens per step the table has
that beside a calibration which today's stable pods support, with 2 degrees. Without one it is 2 %, or what today's stable pods
show (`history_fit`): drafter and target determine tokens per step, but the tenants of a pod differ from another's. For times,
bounds are widened for a share of the differences of such pods: in promote tests for 99 %, in rollback tests for 99.75 %.

Shares pass by exact bounds of counts (`shares`), because a sample variance is 0 where nothing has happened yet. A drafter must
not change outputs at all, so output length, truncated requests and greedy answers are alarms, not goals.

Tokens per step are a means to an end; users feel the time per output token. So the two are evaluated together. While the time is
significantly below the control's (alpha 0.025), a canary is not rolled back for its tokens per step. Nor does it need to pass in
them then: a lighter drafter may get fewer tokens a step and be faster. And no gain in tokens per step promotes a canary whose
time per output token is not significantly good enough. An objective is an additional guard: the mean rolls back as without it. A
promotion then needs significance for the objective. For the mean it needs only an estimate below the limit, so that the mean is
not probably worse. Where requests are few and uneven, the one is significant hours before the other.

The margin covers what cannot be distinguished, and is no allowance. A canary significantly below its control is rolled back
though it is within the margin, unless it is faster.

Tokens per step are the tokens of requests after their first, divided by the steps that generated them. That is (generated - first
tokens) / request steps, as `aerie.engine.metrics.rates.tokens_per_step`. Acceptance length, 1 + accepted / drafts, is shown and
not evaluated. vLLM also counts draft tokens as accepted behind the end of an answer, which no request gets (vllm issue 56101:
v1/core/sched/scheduler.py counts before it trims, in 0.32.0 and 0.33.0). That adds some tenths of a percent to 4 %, the more the
shorter the answers and the better the drafter. So it flatters the better arm. Dummy drafts, which acceptance length counts, are
in no request step, and neither are chunks of a prompt. A step that recomputes a preempted request counts in both, with one token.

| where                          | in place of the first row                                                                |
|--------------------------------|------------------------------------------------------------------------------------------|
| the arms draft different K     | time per output token, with its alpha: a text fixes its tokens, not its drafts, so that  |
|                                | drafts of a larger K begin at harder places, and one drafter shows 2 to 6 % less there   |
| both verify adaptively, same K | time per output token, with its alpha; and tokens per step roll back when significantly  |
|                                | below control * 0.9, alpha 0.005, counted while both have as many requests in flight     |
| neither may be compared        | time per output token, with its alpha                                                    |

Adaptive verification trims drafts, the more the more requests are in flight, and counts them as not accepted. So acceptance
depends on the load there: by some percent, within the 20 % that loads may differ by. Where the arms run on different hardware,
the rows with "load" are left out, because the GPU may decide them. Where tokens per step may not be compared then, nothing is
promoted.

Trials of a speculation setting (goal Faster) are about time, with these rows in place of the first three:

| time per output token  | mean above control * 1.02           | 0.0175 | mean below the control's            | yes  |       |
| ... objective, if any  | as above                            | 0.0025 | as above                            | yes  |       |
| tokens per busy second | below control * 0.9                 | 0.0075 | -                                   | yes  |       |

An exploration (goal Explore) is only measured: it is never promoted, and may be slower. It is rolled back for a mean above
control * 1.5, the share and all other rows. Its tokens per busy second are counted, because its goal may become Faster. A trial
has to show a difference of its own pods, so the prior on pods does not widen its bounds: trials repeat, and a setting is chosen
again every few hours.

    plan                    parameters of an analysis
    criterion               a criterion and its tests as data; the names of the criteria
    table                   the rows above, for a plan
    fractions               values of the criteria, from counts
    sequence_parameters     parameters of the bounds of a test
    history_fit             whether the calibration holds for today's stable pods
"""
