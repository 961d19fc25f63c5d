"""Embedding and language model head, sharded by vocabulary."""

from .family import FAMILY, LmHead

__all__ = ["FAMILY", "LmHead"]
