"""Errors that a user can fix."""

from contextlib import contextmanager

import pytest

from loopdropout_trainer.errors import UserError


@contextmanager
def user_error(match):
    """Expect a `UserError` whose message matches and is one line."""
    with pytest.raises(UserError, match=match) as error:
        yield error
    assert "\n" not in str(error.value)
