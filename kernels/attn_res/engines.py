"""The engines of the family: one line each."""

from __future__ import annotations

from ..contract import Engine
from .cute_cluster_engine import CuteClusterEngine
from .triton_engine import TritonEngine

ENGINES: tuple[Engine, ...] = (CuteClusterEngine(), TritonEngine())
