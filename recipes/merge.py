"""Merge a saved adapter into its base model, and push the result to the Hub if a name is given.

    python recipes/merge.py --model_name_or_path ByteDance/Ouro-1.4B --adapter outputs/gsm8k
    python recipes/merge.py outputs/gsm8k/recipe.yaml --adapter outputs/gsm8k --hub_model_id user/name

The base model is given by name, or by the recipe of the training. One process is enough, also for adapters that many trained.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from loopdropout_trainer import LoopDropoutConfig, merge_and_save, push_merged_to_hub
from loopdropout_trainer.checks import check_folder
from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.errors import hide_secrets, run_command, user_supplied
from loopdropout_trainer.evaluation.subject import load_model
from loopdropout_trainer.processes import show_log
from loopdropout_trainer.record.measurement import RecordError
from loopdropout_trainer.runs.result import FORMER_FILE, Result, is_of_former_version, training_result
from loopdropout_trainer.saving.cards import ModelCardFields
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.recipe import parse_recipe


logger = logging.getLogger("loopdropout_trainer.merge")


@dataclass
class MergeArguments:
    """Which adapter to merge, and where the merged model goes."""

    adapter: str = field(metadata={"help": "Folder of the adapter, or its name on the Hub."})
    merged_dir: str | None = field(
        default=None, metadata={"help": "Folder for the merged model. Default: `merged` in the adapter's folder."}
    )
    hub_model_id: str | None = field(default=None, metadata={"help": "Push to this name on the Hub, `user/model`."})
    hub_private_repo: bool | None = field(default=None, metadata={"help": "Whether a new repository is private."})


def facts_of_run(adapter: Path) -> ModelCardFields:
    """Return what the files beside an adapter tell about its run."""
    recipe, text, result = adapter / "recipe.yaml", None, Result()
    try:
        result = training_result(adapter)
    except RecordError as error:
        logger.warning("The card states no accuracies: %s", error)
    if is_of_former_version(adapter) and not result.rows:
        logger.warning(
            "%s in %s is of an earlier version of this package, and is not read: the card states no accuracies.",
            FORMER_FILE,
            adapter,
        )
    if recipe.is_file():
        with user_supplied(f"{recipe} cannot be read"):
            text = hide_secrets(recipe.read_text(encoding="utf-8"))
    return ModelCardFields(recipe=text, results=result.card_scores())


def main(argv: list[str] | None = None) -> None:
    types, unread = (
        (MergeArguments, ModelArguments),
        (RunArguments, AdapterArguments, DataArguments, LoopDropoutConfig),
    )
    (merge, model), _ = parse_recipe(types, argv, description=__doc__, unread_types=unread)
    merged_dir = Path(merge.adapter) / "merged" if merge.merged_dir is None else merge.merged_dir
    check_folder("merged_dir", merged_dir)
    with user_supplied("`hub_model_id` cannot be used"):
        validate_repo_id("model" if merge.hub_model_id is None else merge.hub_model_id)
    show_log()
    adapted, tokenizer = load_model(model, merge.adapter)
    folder = merge_and_save(
        adapted, merged_dir, tokenizer, facts_of_run(Path(merge.adapter)), repo_id=merge.hub_model_id
    )
    print(f"Merged model in {folder}")
    if merge.hub_model_id is not None:
        print(f"Pushed to {push_merged_to_hub(folder, merge.hub_model_id, private=merge.hub_private_repo)}")


if __name__ == "__main__":
    run_command(main)
