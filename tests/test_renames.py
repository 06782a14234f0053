"""Old names work for one release, with a warning that names the new one."""

import pytest
from conftest import tiny_ouro

from loopdropout_trainer import looped


def test_old_function_warns():
    model = tiny_ouro()
    own_depth = model.num_loops
    with pytest.warns(DeprecationWarning, match="`set_depth` is now `use_depth`"), looped.set_depth(model, 2):
        assert model.num_loops == 2
    assert model.num_loops == own_depth
