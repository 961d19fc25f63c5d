"""The engines of the family: one line each."""

from __future__ import annotations

from ..contract import Engine
from .cute_fused_engine import CuteFusedEngine
from .cute_split_engine import CuteSplitEngine

ENGINES: tuple[Engine, ...] = (CuteFusedEngine(), CuteSplitEngine())
