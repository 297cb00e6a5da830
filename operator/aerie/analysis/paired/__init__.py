"""Compares two drafters by their answers to the same requests, pairs, before a user reaches the new one: shadow evaluation.

    sums         the sufficient sums of pairs, by bucket of clusters
    sequence     the anytime-valid, cluster-robust confidence sequence of the ratio of amounts per token
    answers      counts of what was answered, and the tests that no drafter changes answers
    failures     counts of what one arm alone failed to answer, and the canary's outage
    plan         the criteria with their alphas and limits; fixed when an evaluation begins
    state        the counts so far, and the change by each further batch of an evaluator
    verdict      the verdict after each batch, with its message
    power        forecasts of the pairs that a verdict takes

Requests differ tenfold in how well they can be drafted. A pair differs by the drafter alone, so hundreds of pairs decide what
takes thousands of requests between pods.
"""
