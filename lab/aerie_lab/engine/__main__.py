"""`python -m aerie_lab.engine MODEL [vLLM's flags]`: a simulated `vllm serve`."""

import os
import sys

# One thread: the process has a core at most, and each thread of a numerical library costs memory.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from aerie_lab.engine.serving.server import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
