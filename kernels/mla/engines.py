"""The engines of the family: one line each."""

from __future__ import annotations

from ..contract import Engine
from .cute_mma_engine import CuteMmaEngine
from .triton_engine import TritonEngine

ENGINES: tuple[Engine, ...] = (CuteMmaEngine(), TritonEngine())
