"""The engines of the family: one line each."""

from __future__ import annotations

from ..contract import Engine
from .cute_fused_engine import CuteFusedEngine
from .cute_mma_engine import CuteMmaEngine
from .triton_engine import TritonEngine

ENGINES: tuple[Engine, ...] = (CuteFusedEngine(), CuteMmaEngine(), TritonEngine())
