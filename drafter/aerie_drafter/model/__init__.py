"""The drafter as a PyTorch module, in the meaning that vLLM serves.

drafter     what is computed in one step, and what is fed to the next
attention   attention over a step's keys and the keys of later steps, without the unrolled mask
memory      which keys a step sees: in training (all columns at once) and in drafting (token by token)
layers      the attention forms (Llama, Qwen3, MLA), MLP and rotary positions
"""

from aerie_drafter.model.drafter import Drafter, DrafterOutput
from aerie_drafter.model.memory import DecodingCache, UnrolledCache

__all__ = ["DecodingCache", "Drafter", "DrafterOutput", "UnrolledCache"]
