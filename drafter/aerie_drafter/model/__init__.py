"""The drafter as a PyTorch module, with the semantics of vLLM.

drafter     computation of one step, and the state that is fed to the next
attention   attention over a step's keys and the keys of later steps, without the unrolled mask
window      causal attention with a sliding window
memory      KV caches: for training (all columns at once) and for drafting (token by token)
layers      the attention forms (Llama, Qwen3, MLA), MLP and rotary positions
"""

from aerie_drafter.model.drafter import Drafter, DrafterOutput
from aerie_drafter.model.layers import ProjectedTokens
from aerie_drafter.model.memory import DecodingCache, UnrolledCache

__all__ = ["DecodingCache", "Drafter", "DrafterOutput", "ProjectedTokens", "UnrolledCache"]
