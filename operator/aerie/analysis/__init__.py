"""Statistics that classify a canary as better than, equal to, or worse than its control, from counts of two arms of pods.

    measurement/counts                  the few numbers of a scrape that an analysis keeps
    measurement/blocks                  closes blocks: time windows in which both arms are counted; exclusions are reported
    measurement/load_match              tests whether both arms received the same load
    statistics/calibration              dispersion of blocks where nothing differs: stable pods against stable pods
    statistics/confidence_sequence      anytime-valid bounds and e-values
    statistics/shares                   exact bounds of small shares, from counts
    statistics/crash_rate               processes that end, by pod-hours
    statistics/load_adjustment          adjusts a time metric to the same output of a pod
    criteria                            the comparisons, with the alphas and tolerances of each; the analysis plan
    formatting                          estimates, bounds and limits as text
    baseline                            the calibration of every criterion, block by block
    equivalence                         tests whether greedy answers are still the target's
    state                               the counts so far, and the change by each further block
    verdict                             the verdict after a block; messages has the texts
    post_promotion                      tests whether promoted pods have regressed

Guarantee: no module here reads a clock, the network or a random source. States are frozen and go through dicts unchanged, so an
analysis resumes after a crash where it stopped.
"""
