"""Model card, GPU cards, the kernel contract, and one folder a kernel family."""

from .contract import Arg, Buffer, Compiled, Engine, Family, Launch, Problem, Tolerance, Traffic, Work
from .errors import InputError
from .evidence import Evidence
from .model_card import K3, SMALL_K3, ModelCard
from .registry import family, family_names
from .space import Config, Constraint, Param, Space, config_digest

__all__ = [
    "K3", "SMALL_K3", "Arg", "Buffer", "Compiled", "Config", "Constraint", "Engine", "Evidence", "Family",
    "InputError", "Launch", "ModelCard", "Param", "Problem", "Space", "Tolerance", "Traffic", "Work",
    "config_digest", "family", "family_names",
]  # fmt: skip
