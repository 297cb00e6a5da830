"""Training of drafters.

    data ─► states ─► ttt ─► trainer        settings: the YAML file that says what they do
                                            generate: the target's own answers to a file of prompts

ttt       the loss: training-time test, unrolled over the drafter's own states
states    what the target makes of a text: its auxiliary and final hidden states
data      conversations to tokens, rows and batches; the draft vocabulary
trainer   the loop: optimiser, processes, checkpoints, the choice of the best
"""
