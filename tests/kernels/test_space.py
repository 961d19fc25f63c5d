"""Spaces: constraints explain themselves, digests do not depend on key order."""

import pytest
from k3lab.kernels import Constraint, InputError, Param, Space, config_digest


def small() -> Space:
    return Space(
        params=(Param("tile", (16, 32, 64), "rows"), Param("split", (1, 2), "ways")),
        constraints=(Constraint(lambda c: c["tile"] * c["split"] <= 64, "tile {tile} x split {split} exceeds 64"),),
        default={"tile": 16, "split": 1},
    )


def test_legal_points_are_those_the_constraint_admits():
    assert [tuple(c.values()) for c in small().legal] == [(16, 1), (16, 2), (32, 1), (32, 2), (64, 1)]
    assert small().size == 6


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tile": 64, "split": 2}, "tile 64 x split 2 exceeds 64"),
        ({"tile": 8, "split": 1}, "tile is 8, legal values are 16, 32, 64"),
        ({"tile": 16}, "'split' is missing"),
        ({"tile": 16, "split": 1, "warps": 4}, "unknown parameter 'warps'"),
    ],
)
def test_illegal_points_say_why(config, says):
    assert says in small().illegal(config)
    with pytest.raises(InputError, match="illegal config"):
        small().check(config)


def test_refusals_are_counted_by_reason():
    assert small().refusals() == {"tile {tile} x split {split} exceeds 64": 1}


def test_default_must_be_legal():
    with pytest.raises(ValueError, match="default config is illegal"):
        Space((Param("tile", (16,), ""),), (), {"tile": 8})


def test_digest_ignores_order_and_tells_values_apart():
    assert config_digest({"a": 1, "b": 2}) == config_digest({"b": 2, "a": 1})
    digests = {config_digest(c) for c in ({"a": 1}, {"a": 2}, {"a": "1"}, {"a": True}, {"b": 1}, {"a": 1, "b": 1})}
    assert len(digests) == 6


def test_a_value_of_another_type_is_not_that_value():
    space = Space(
        (Param("split", (1, 2), "splits"), Param("deep", (False, True), "deep")), (), {"split": 1, "deep": False}
    )
    assert space.illegal({"split": 2, "deep": True}) is None
    for config in ({"split": True, "deep": True}, {"split": 2.0, "deep": True}, {"split": 2, "deep": 1}):
        assert "legal values are" in space.illegal(config)


def test_a_part_of_a_space_holds_what_it_was_told():
    part = small().restricted({"split": 2})
    assert [tuple(c.values()) for c in part.legal] == [(16, 2), (32, 2)]
    assert part.default == {"tile": 16, "split": 2}
    assert small().restricted({}).legal == small().legal


def test_the_default_of_a_part_is_the_legal_one_nearest_to_the_default():
    space = Space(
        params=(Param("a", (1, 2, 3), ""), Param("b", (1, 2, 3), ""), Param("c", (1, 2), "")),
        constraints=(Constraint(lambda c: c["a"] == 1 or c["b"] > 1, "b {b} is too small"),),
        default={"a": 1, "b": 1, "c": 2},
    )
    assert space.restricted({"a": 3}).default == {"a": 3, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("fixed", "says"),
    [
        ({"warps": 4}, "unknown parameter 'warps'; the space has split, tile"),
        ({"tile": 8}, "tile is 8, legal values are 16, 32, 64"),
        ({"split": True}, "split is True, legal values are 1, 2"),
        ({"tile": 64, "split": 2}, "no legal config has tile=64, split=2: tile 64 x split 2 exceeds 64"),
    ],
)
def test_a_part_that_is_none_says_why(fixed, says):
    with pytest.raises(InputError) as caught:
        small().restricted(fixed)
    assert str(caught.value) == says
