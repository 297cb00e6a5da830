"""EAGLE 3 heads in which what distinguishes EAGLE 3 from 3.1 is a gate in device memory, one class for each of vLLM's."""
