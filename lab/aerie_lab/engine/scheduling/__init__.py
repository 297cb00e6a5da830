"""vLLM's scheduling as the simulator does it: who is in the next step, with how many tokens, and the KV cache that limits it."""
