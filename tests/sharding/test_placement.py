"""The `--mesh` language: what it places, what it refuses, how axes fill a role's devices."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from jaxrl.errors import UserError
from jaxrl.sharding.axes import Axes, resolve_axes
from jaxrl.sharding.placement import (
    ROLES,
    check_visible,
    device_list,
    narrow,
    parse,
    place,
    place_without_devices,
)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("actor=2,rollout=2,teacher=4", {"actor": (0, 2), "rollout": (2, 4), "teacher": (4, 8)}),
        ("actor=1,rollout=3,teacher=4", {"actor": (0, 1), "rollout": (1, 4), "teacher": (4, 8)}),
        ("actor+rollout=6,teacher=2", {"actor": (0, 6), "rollout": (0, 6), "teacher": (6, 8)}),
        (" actor + rollout = 1 ", {"actor": (0, 1), "rollout": (0, 1)}),
        (
            "actor+rollout+reward+grouper=8",
            dict.fromkeys(("actor", "rollout", "reward", "grouper"), (0, 8)),
        ),
    ],
)
def test_pools_take_devices_in_order(spec: str, expected: dict[str, tuple[int, int]]) -> None:
    placement = parse(spec)
    found = {name: (r.devices.start, r.devices.stop) for name, r in placement.roles.items()}
    assert found == expected
    assert placement.n_devices == max(stop for _, stop in expected.values())


def test_pools_are_disjoint_and_leave_no_gap() -> None:
    counts = (1, 2, 3, 5)
    for a, b, c in itertools.product(counts, repeat=3):
        pools = parse(f"actor+rollout={a},teacher+reference={b},reward={c}").pools
        devices = [i for pool in pools for i in pool.devices]
        assert devices == list(range(a + b + c))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", ["empty", "ROLE=DEVICES"]),
        ("  ", ["empty"]),
        ("actor", ["'actor'", "ROLE=DEVICES"]),
        ("actor=", ["actor=", "at least 1"]),
        ("=2", ["'=2'", "ROLE=DEVICES"]),
        ("actor=2,", ["''", "ROLE=DEVICES"]),
        ("actor=0", ["actor=0", "at least 1"]),
        ("actor=-1", ["actor=-1", "at least 1"]),
        ("actor=2.5", ["actor=2.5", "at least 1"]),
        ("actor=two", ["actor=two", "at least 1"]),
        ("actr=2", ["'actr'", "did you mean actor?"]),
        ("actor=2,zebra=1", ["'zebra'", "one of actor, grouper"]),
        ("actor+=2", ["''", "one of actor"]),
        ("actor=2,actor=2", ["'actor'", "twice"]),
        ("actor+rollout=2,rollout=1", ["'rollout'", "twice"]),
        ("actor=1=2", ["actor=1=2", "at least 1"]),
    ],
)
def test_a_bad_spec_is_refused_in_one_line(spec: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse(spec)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_too_many_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="needs 8 devices, but 4 are visible"):
        check_visible(parse("actor=4,rollout=4"), 4)
    with pytest.raises(UserError, match="needs 2 devices, but 1 is visible"):
        check_visible(parse("actor+rollout=2"), 1)


def test_devices_left_over_are_told_not_refused() -> None:
    placement = check_visible(parse("actor=2,rollout=1"), 8)
    assert placement.notes == ("5 of 8 devices left over: the mesh uses 3",)
    assert check_visible(parse("actor=2"), 2).notes == ()


def test_a_role_that_is_not_placed_joins_the_actor() -> None:
    placement = place("rollout=1,actor=2", ("actor", "rollout", "teacher"))
    assert placement.roles["teacher"].devices == placement.roles["actor"].devices == range(1, 3)
    assert placement.pools[1].roles == ("actor", "teacher")
    assert len(placement.notes) == 1
    assert "teacher" in placement.notes[0]


def test_without_an_actor_there_is_nothing_to_join() -> None:
    with pytest.raises(UserError, match="places no actor: add actor=DEVICES"):
        place("rollout=2", ("actor", "rollout"))


def test_a_role_that_is_placed_but_not_needed_is_told() -> None:
    placement = place("actor+rollout=2,teacher=4", ("actor", "rollout"))
    assert placement.n_devices == 6
    assert placement.notes == ("teacher is placed, but this run does not use it",)


def test_slices_narrow_a_role_within_its_pool() -> None:
    slices = {"reference": "1:2", "reward": "1:", "actor": None, "teacher": "0:1"}
    placement = place("grouper=3,actor+rollout+reference+reward=2", (), slices)
    where = {role: list(r.devices) for role, r in placement.roles.items()}
    assert where["actor"] == where["rollout"] == [3, 4]
    assert where["reference"] == where["reward"] == [4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1:3", ["reward.devices=1:3", "2 devices", "at most 2"]),
        ("2:", ["2 devices"]),
        ("1:1", ["start 1", "stop 1"]),
        ("1", ["'1'", "start:stop", "0:2"]),
        ("a:b", ["'a:b'", "start:stop"]),
        ("-1:", ["'-1:'", "start:stop"]),
    ],
)
def test_a_slice_outside_the_pool_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        narrow(parse("actor=4,rollout+reward=2"), "reward", text)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("role", "n", "given", "expected"),
    [
        ("actor", 4, {}, (1, 4, 1)),
        ("actor", 4, {"tensor": 2}, (1, 2, 2)),
        ("actor", 4, {"fsdp": 2}, (2, 2, 1)),
        ("actor", 8, {"data": -1, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
        ("rollout", 3, {}, (3, 1, 1)),
        ("rollout", 4, {"data": 2}, (2, 1, 2)),
        ("rollout", 4, {"tensor": 4}, (1, 1, 4)),
        ("teacher", 4, {}, (1, 4, 1)),
        ("reference", 2, {}, (1, 2, 1)),
        ("reward", 2, {}, (1, 2, 1)),
        ("grouper", 4, {}, (4, 1, 1)),
        ("actor", 1, {"tensor": -1}, (1, 1, 1)),
        ("actor", 8, {"context": 4}, (1, 2, 1, 4)),
    ],
)
def test_axes_fill_the_devices(
    role: str, n: int, given: dict[str, int], expected: tuple[int, ...]
) -> None:
    axes = resolve_axes(role, n, **given)
    assert axes == Axes(*expected)
    assert axes.size == n


def test_axes_always_multiply_to_the_devices_or_are_refused() -> None:
    sizes = (None, -1, 1, 2, 3)
    for role, n in itertools.product(ROLES, (1, 2, 6)):
        for data, fsdp, tensor in itertools.product(sizes, repeat=3):
            try:
                axes = resolve_axes(role, n, data=data, fsdp=fsdp, tensor=tensor)
            except UserError as error:
                assert role in str(error)
                continue
            assert axes.size == n
            for given, found in zip((data, fsdp, tensor), axes, strict=False):
                assert given in (None, -1, found)


@pytest.mark.parametrize(
    ("n", "given", "words"),
    [
        (4, {"tensor": 3}, ["actor.parallel.tensor=3", "3 devices", "4 devices"]),
        (2, {"data": 4}, ["actor.parallel.data=4", "4 devices", "2 devices"]),
        (4, {"data": 1, "fsdp": 1, "tensor": 2}, ["2 devices", "has 4"]),
        (4, {"data": -1, "fsdp": -1}, ["2 axes are -1", "only 1"]),
        (4, {"data": 0}, ["actor.parallel.data=0", "at least 1"]),
        (6, {"data": -1, "tensor": 4}, ["4 devices", "6 devices"]),
    ],
)
def test_axes_that_do_not_divide_are_refused_with_both_numbers(
    n: int, given: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        resolve_axes("actor", n, **given)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_words() -> None:
    assert device_list([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert str(Axes(1, 2, 2)) == "fsdp=2 tensor=2"
    assert str(Axes(context=4)) == "context=4"
    assert str(Axes()) == "1 device"


def test_the_language_needs_no_jax() -> None:
    code = "import sys, jaxrl.sharding.placement; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_role_without_devices_leaves_its_pool_to_the_others():
    placed = place_without_devices(place("actor+rollout+reward=8", ["actor", "rollout"]), "reward")
    assert [pool.roles for pool in placed.pools] == [("actor", "rollout"), ("reward",)]
    assert placed.n_devices == 8 and not placed.roles["reward"].devices and not placed.notes
    with pytest.raises(UserError, match="reward takes no devices"):
        place_without_devices(place("actor+rollout=2,reward=1", ["actor", "rollout"]), "reward")
