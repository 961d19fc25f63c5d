"""The engines of the family: one line each."""

from __future__ import annotations

from ..contract import Engine
from .cute_mma_engine import CuteMmaEngine
from .cute_rows_engine import CuteRowsEngine
from .triton_engine import TritonEngine

ENGINES: tuple[Engine, ...] = (CuteMmaEngine(), CuteRowsEngine(), TritonEngine())
