"""Names of what stands beside the kernels, for those that read a record without a GPU."""

from __future__ import annotations

ALL_REDUCES = ("nccl", "symm_mem_one_shot", "symm_mem_two_shot")
"""Of BF16 [rows, hidden], in place of a family's exchange alone."""
NCCL_CHAIN = "nccl_chain"
"""The family's work in PyTorch operators, its collectives by NCCL."""
