"""The families, by name. Adding one is one line here, or an entry point ``k3lab.families`` elsewhere."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points

from .contract import Family
from .errors import InputError

FAMILIES: dict[str, str] = {
    "attention_projection": "k3lab.kernels.attention_projection:FAMILY",
    "output_projection": "k3lab.kernels.output_projection:FAMILY",
    "router": "k3lab.kernels.router:FAMILY",
    "experts": "k3lab.kernels.experts:FAMILY",
    "kda": "k3lab.kernels.kda:FAMILY",
    "mla": "k3lab.kernels.mla:FAMILY",
    "moe_tail": "k3lab.kernels.moe_tail:FAMILY",
    "attn_res": "k3lab.kernels.attn_res:FAMILY",
    "lm_head": "k3lab.kernels.lm_head:FAMILY",
}


@cache
def _locations() -> dict[str, str]:
    found = dict(FAMILIES)
    for point in entry_points(group="k3lab.families"):
        found.setdefault(point.name, point.value)
    return found


@cache
def _claims() -> dict[str, str]:
    """Names that more than one package claims, and in which words they are refused: none of them is taken silently."""
    found = {}
    for point in entry_points(group="k3lab.families"):
        first = _locations().get(point.name, point.value)
        if point.name in FAMILIES:
            found[point.name] = (
                f"package entry point {point.value!r} claims the family name {point.name!r}, which k3lab has itself"
            )
        elif first != point.value:
            found[point.name] = (
                f"two packages claim the family name {point.name!r}: {first} and {point.value}; uninstall one"
            )
    return found


def family_names() -> tuple[str, ...]:
    """Names of all registered families, the model's own first."""
    return tuple(_locations())


def location(name: str) -> str:
    """``module:ATTRIBUTE`` of a registered family.

    Raises:
        InputError: no such family.
    """
    if name not in _locations():
        raise InputError(f"unknown family {name!r}; families: {', '.join(_locations())}")
    return _locations()[name]


@cache
def family(name: str) -> Family:
    """The family of that name; imports it.

    Raises:
        InputError: no such family (the message lists those there are), one that cannot be loaded, or a name that a
            second package claims. Other families are not concerned.
    """
    locations = _locations()
    if name not in locations:
        raise InputError(f"unknown family {name!r}; families: {', '.join(locations)}")
    if name in _claims():
        raise InputError(_claims()[name])
    module_name, _, attribute = locations[name].partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # another package's module may raise anything
        raise InputError(
            f"family {name!r} cannot be loaded from {locations[name]}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Family):
        raise InputError(f"family {name!r}: {locations[name]} is a {type(found).__name__}, not a Family")
    return found
