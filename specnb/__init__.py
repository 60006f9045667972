"""specnb: is this speculative-decoding drafter worth putting in front of this target?

Light by design: importing it loads no torch, vllm, transformers or altair.
"""

from specnb.config import Plan, read_plan
from specnb.errors import SpecnbError
from specnb.records import Run, read_run

__all__ = ["Plan", "Run", "SpecnbError", "__version__", "read_plan", "read_run"]
__version__ = "0.1.0"
