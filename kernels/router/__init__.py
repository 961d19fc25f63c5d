"""Router and latent down-projection, sharded by rows, and the expert choice."""

from .family import FAMILY, Router

__all__ = ["FAMILY", "Router"]
