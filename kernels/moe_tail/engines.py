"""The engines of the family: one line each."""

from __future__ import annotations

from ..contract import Engine
from .cute_fused_engine import CuteFusedEngine

ENGINES: tuple[Engine, ...] = (CuteFusedEngine(),)
