"""Values: what messages and effects have in common, interpreted and compiled."""

from __future__ import annotations

import copy
import pickle

import pytest

from services.core.value import fields
from services.queue.core.messages import Claim, Renew


def test_values_of_one_kind_with_equal_fields_are_equal() -> None:
    assert Claim(1, "a") == Claim(request_id="a", stream=1)
    assert hash(Claim(1, "a")) == hash(Claim(1, "a"))
    assert Claim(1, "a") != Claim(2, "a")
    assert Claim(1, "a") != (1, "a")


def test_values_of_two_kinds_are_not() -> None:
    claim, renew = Claim(1, "a"), Renew(1, ())
    assert claim != renew


def test_a_value_shows_its_fields_by_name_in_order() -> None:
    assert repr(Claim(1, "a")) == "Claim(stream=1, request_id='a')"
    assert fields(Claim(1, "a")) == {"stream": 1, "request_id": "a"}


def test_a_value_can_be_copied_and_pickled() -> None:
    one = Claim(1, "a")
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one


def test_another_is_made_with_some_fields_replaced() -> None:
    one = Claim(1, "a")
    assert one.replace(stream=2) == Claim(2, "a")
    assert one == Claim(1, "a")
    with pytest.raises(TypeError):
        one.replace(flow=2)
