"""Multi-head latent attention core on a paged cache."""

from .family import FAMILY, Mla

__all__ = ["FAMILY", "Mla"]
