"""The harness tells the ways apart in which code can fail, and names the case."""

import ctypes
import functools
import time
from random import Random

import pytest

from irkit.errors import BadValueError


def misbehave(case):
    what = case[0]
    if what == "error":
        raise BadValueError("told")
    if what == "foreign":
        raise ValueError("not told")
    if what == "memory":
        bytearray(1 << 40)
    if what == "crash":
        ctypes.string_at(1)
    while what == "hang":
        pass
    return what


def test_each_outcome_is_told_and_those_after_it_are_tried(attempt):
    words = ["right", "crash", "error", "hang", "foreign", "memory", "wrong"]
    found = list(attempt(iter([[word] for word in words]), misbehave, float("inf"), cpu_seconds=0.5))
    assert [case[0] for case, _ in found] == words
    names = [outcome[0] for _, outcome in found]
    assert names == ["right", "crash", "clean", "hang", "foreign", "memory", "wrong"]
    crash, foreign = found[1][1][1], found[4][1][1]
    assert "SIGSEGV" in crash
    assert "misbehave" in crash  # where it was, by faulthandler
    assert foreign.startswith("ValueError: not told")


def test_a_child_stops_in_time(attempt):
    endless = iter(lambda: ["right"], None)
    begin = time.monotonic()
    found = list(attempt(endless, misbehave, begin + 0.2))
    assert found
    assert {outcome[0] for _, outcome in found} == {"right"}


def test_a_target_fails_with_its_smallest_case(fuzz, request):
    def run(case):
        return "wrong" if 7 in case else "right"

    with pytest.raises(pytest.fail.Exception, match=r"\n\[7\]\n  wrong"):
        fuzz("none", lambda random: [random.randrange(9) for _ in range(5)], run)
    request.node.user_properties.clear()


@pytest.mark.parametrize("value", [b"", bytes(range(256)), {"a": [1, 2.5, {"b": "text"}], "c": None}, 3])
def test_mutations_can_be_applied_in_any_order(mutate, value):
    random = Random(0)
    edits = [mutate.choose(random, value) for _ in range(300)]
    results = [mutate.apply(value, edit) for edit in edits]
    assert sum(result != value for result in results) > (200 if value else 20)
    functools.reduce(mutate.apply, [edit for edit in edits if edit[0] != "deep"], value)
