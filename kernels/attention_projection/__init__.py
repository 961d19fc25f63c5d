"""Attention input projection: the first kernel of every layer, pure weight streaming."""

from .family import FAMILY, AttentionProjection

__all__ = ["FAMILY", "AttentionProjection"]
