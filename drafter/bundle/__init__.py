"""The recipe of the shipped bundle: a small target and three drafters for it, trained from scratch by `make bundle`.

    corpus ─► tokenizer ─► target ─► answers ─► drafters ─► registry.json

It uses the package `aerie_drafter` like any user, who can do the same for another target. The results are here too, ready for
`vllm serve`: target/, eagle3/, eagle31/, weak/ (README.md).
"""
