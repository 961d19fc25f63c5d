"""The engines of the family: one line each."""

from __future__ import annotations

from ..contract import Engine
from .cute_mma_engine import CuteMmaEngine
from .cute_skinny_engine import CuteSkinnyEngine
from .cute_tcgen05_engine import CuteTcgen05Engine
from .cute_wgmma_engine import CuteWgmmaEngine
from .triton_engine import TritonEngine

ENGINES: tuple[Engine, ...] = (
    TritonEngine(),
    CuteSkinnyEngine(),
    CuteMmaEngine(),
    CuteWgmmaEngine(),
    CuteTcgen05Engine(),
)
