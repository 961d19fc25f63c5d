"""Routed MXFP4 experts and the shared expert."""

from .family import FAMILY, Experts

__all__ = ["FAMILY", "Experts"]
