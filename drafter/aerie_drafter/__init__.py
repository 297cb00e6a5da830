"""EAGLE 3 and EAGLE 3.1 drafters in PyTorch: model, training, export, inspection and evaluation.

    config ─► model ─► train ─► export          (what a checkpoint is: checkpoint, convert, inspect)
                 └───► evaluate, drift          (what it does: acceptance length, and how it drifts with depth)

A package apart from the operator because the operator's image must not carry torch. The meaning of every switch and tensor
is vLLM's (llama_eagle3.py, qwen3_eagle3.py, deepseek_eagle3.py; pull requests 42764 and 43482), which tests hold it to.
"""
