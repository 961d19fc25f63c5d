"""Attention residuals: a softmax mix of saved blocks and the running residual."""

from .family import FAMILY, AttnRes

__all__ = ["FAMILY", "AttnRes"]
