"""Whether a canary is better, as good, or worse: pure statistics over what two arms of pods counted.

    readings      the few numbers of a scrape that an analysis keeps
    blocks        closes blocks of time in which both arms are counted; what cannot be counted is dropped, visibly
    calibration   how blocks scatter where nothing differs: stable pods against stable pods
    sequential    bounds and e-values that hold however often they are looked at
    shares        bounds of small shares, by counts
    crashes       processes that end, by pod-hours
    criteria      what is compared, with the alphas and tolerances of each
    memory        the calibration of every criterion, block by block
    lossless      whether greedy answers are still the target's
    counting      what the blocks have told, and what each further block adds
    judgement     the verdict after a block; reasons has the words

Guarantee: nothing here reads a clock, the network or a random source. States are frozen and go through dicts unchanged, so an
analysis goes on after a crash where it stood.
"""
