"""The engine core: one replica as a state machine, vLLM's scheduling of its steps, and the KV cache that limits it.

replica    completes the steps, one after the other
scheduler  who is in the next step, with how many tokens
kv_cache   the blocks of each request
"""
