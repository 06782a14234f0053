"""What people do with a trainer and its model in a notebook: the right result, or one sentence."""

import pytest

from helpers.errors import user_error
from helpers.tiny import tiny_ouro
from helpers.trainers import assert_same_weights
from loopdropout_trainer import merge_and_save


def checkpoint_reentrant(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


def test_reentrant_checkpoints_of_a_model_train_the_same(train, make_sft):
    plain = train(gradient_checkpointing=False)
    assert_same_weights(train(checkpoint_reentrant(tiny_ouro()), gradient_checkpointing=False), plain)
    later = make_sft(gradient_checkpointing=False)
    checkpoint_reentrant(later.model)
    later.train()
    assert_same_weights(later, plain)


ACTIONS = {"train": lambda trainer, folder: trainer.train(), "save": lambda trainer, folder: trainer.save_model()}
ACTIONS["merge"] = lambda trainer, folder: merge_and_save(trainer.model, folder)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("remove", ["merge_and_unload", "unload"])
def test_model_without_its_adapter_layers_raises(train, tmp_path, remove, action):
    trainer = train(max_steps=1)
    getattr(trainer.model, remove)()
    with user_error(
        r"The layers of the adapter 'default' must be .* `merge_and_unload` or `unload`.*`merge_and_save`"
    ):
        ACTIONS[action](trainer, tmp_path / "merged")


@pytest.mark.parametrize("action", ["train", "merge"])
def test_merged_adapter_neither_trains_nor_merges_again(train, tmp_path, action):
    trainer = train(max_steps=1)
    trainer.model.merge_adapter()
    with user_error(r"must not be merged into the weights, got \['default'\]. Call `unmerge_adapter`"):
        ACTIONS[action](trainer, tmp_path / "merged")
    trainer.model.unmerge_adapter()
    ACTIONS[action](trainer, tmp_path / "merged")
