"""Kimi Delta Attention core: what keeps a recurrent state in place of a cache."""

from .family import FAMILY, Kda

__all__ = ["FAMILY", "Kda"]
