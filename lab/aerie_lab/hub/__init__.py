"""A small Hugging Face Hub inside the lab, because nothing in the lab reaches the real one.

checkpoints  the repositories that it has: folders of this machine, and headers without weights, as data
server       the Hub's HTTP interface, as far as aerie, huggingface_hub and vLLM use it
"""
