"""Output projection: o-proj, all-reduce, residual, AttnRes and the norm before the MLP."""

from .family import FAMILY, OutputProjection

__all__ = ["FAMILY", "OutputProjection"]
