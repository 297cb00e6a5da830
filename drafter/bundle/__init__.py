"""The recipe of the shipped bundle: a small target and three drafters for it, trained from scratch by `make bundle`.

    corpus ─► tokenizer ─► target ─► answers ─► drafters ─► registry.json

It stands beside the package `aerie-drafter`, of which it is a user: what it does, a user can do with `aerie-drafter` for a target of
theirs. The results lie here too, ready for `vllm serve`: target/, eagle3/, eagle31/, weak/ (README.md).
"""
