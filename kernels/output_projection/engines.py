"""The engines of the family: one line each."""

from __future__ import annotations

from ..contract import Engine
from .cute_apart_engine import CuteApartEngine
from .cute_fused_engine import CuteFusedEngine
from .cute_split_engine import CuteSplitEngine

ENGINES: tuple[Engine, ...] = (CuteFusedEngine(), CuteApartEngine(), CuteSplitEngine())
