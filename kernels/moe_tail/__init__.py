"""MoE tail: from the experts' partial sums to the next layer's input."""

from .family import FAMILY, MoeTail

__all__ = ["FAMILY", "MoeTail"]
