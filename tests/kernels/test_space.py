"""Spaces: constraints explain themselves, digests do not depend on key order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
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


RULES = (
    lambda c: c["c"] != 0,  # what the next one counts on
    lambda c: c["a"] % c["c"] == 0 or c["b"] > 1,
    lambda c: c["d"] == "free" or all(c[name] == 1 for name in ("a", "b")),  # what it reads depends on d
    lambda c: len(set(c.values())) > 2,  # reads all
    lambda c: c.get("b", 5) != 3 and "a" in c,
)


@given(st.lists(st.sampled_from(range(len(RULES))), unique=True), st.permutations("abcd"))
def test_the_short_way_lists_what_the_long_way_lists(rules, order):
    """Whatever the constraints read, in whatever order the parameters come: the same points in the same order."""
    values = {"a": (1, 2, 4), "b": (1, 2, 3), "c": (0, 1, 2), "d": ("free", "invariant")}
    if 1 in rules:
        rules = [0, 1, *(rule for rule in rules if rule > 1)]
    space = Space(
        tuple(Param(name, values[name], "") for name in order),
        tuple(Constraint(RULES[rule], "no") for rule in rules),
        {"a": 4, "b": 2, "c": 1, "d": "free"},
    )
    assert space.legal == tuple(config for config in space.points() if space.illegal(config) is None)


def test_an_early_refusal_is_asked_once():
    asked = []

    def holds(config):
        asked.append(config["a"])
        return config["a"] == 2

    values = tuple(range(40))
    space = Space(
        tuple(Param(name, values, "") for name in "abcd"),
        (Constraint(holds, "a is 2"), Constraint(lambda c: c["b"] + c["c"] + c["d"] == 0, "the rest is 0")),
        {"a": 2, "b": 0, "c": 0, "d": 0},
    )
    asked.clear()
    assert space.legal == ({"a": 2, "b": 0, "c": 0, "d": 0},)
    assert asked == list(values)


def test_a_constraint_that_breaks_is_heard():
    with pytest.raises(ZeroDivisionError):
        _ = Space(
            (Param("a", (1, 0), ""), Param("b", (1, 2), "")),
            (Constraint(lambda c: 1 // c["a"] > 0, ""),),
            {"a": 1, "b": 1},
        ).legal


def test_refusals_are_counted_by_reason():
    assert small().refusals() == {"tile {tile} x split {split} exceeds 64": 1}


def test_default_must_be_legal():
    with pytest.raises(InputError, match="no config is known that serves this problem"):
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
