"""A request's body has a bound, whatever its headers say of it."""

import pytest

from tests.fuzz import body
from tests.fuzz.body import STATED


@pytest.mark.parametrize("stated", range(len(STATED) + 1))
@pytest.mark.parametrize("cut", [(1,), (100, 0), (255, 2), (255, 0, 255, 0, 255, 0, 255, 0, 9)])
def test_no_application_sees_a_longer_body_than_the_limit_and_the_answer_is_413(
    stated: int, cut: tuple[int, ...]
) -> None:
    body.target(bytes((stated, *cut)))
