"""Merge a saved adapter into its base model, and push the merged model to the Hub.

    loopdropout merge outputs/gsm8k
    loopdropout merge outputs/gsm8k --output_dir merged --hub_model_id user/name
    loopdropout merge outputs/gsm8k --scale 0.3 --standalone true

`adapter_config.json` names the base model. If the base model has moved, set
`--model_name_or_path`. A base model that was quantized in the training is
quantized and dequantized again, unless you set `--model_name_or_path`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loopdropout_trainer.errors import UserError, join_command, run_script
from loopdropout_trainer.files import check_link, is_checkpoint
from loopdropout_trainer.saving import integrity
from loopdropout_trainer.saving.cards import read_card_fields
from loopdropout_trainer.saving.loading import load
from loopdropout_trainer.saving.merging import merge_and_save, push_merged_to_hub
from loopdropout_trainer.saving.metadata import MERGED_FOLDER
from loopdropout_trainer.saving.pushing import check_repository
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.settings.arguments import option
from loopdropout_trainer.settings.recipe import name_words, parse
from loopdropout_trainer.terminal import print_sentences


@dataclass
class MergeArguments:
    """The adapter, its base model, and the folder of the merged model."""

    first_words = "ADAPTER"

    adapter: str = option(..., "Folder or Hub name (`user/name@branch`) of the adapter.")
    output_dir: str | None = option(
        None,
        "Folder for the merged model. Default: `merged` in the adapter's folder, and CHECKPOINT-merged next to a checkpoint.",
    )
    model_name_or_path: str | None = option(
        None, "Hub name or folder of the base model. Default: as in adapter_config.json."
    )
    model_revision: str | None = option(None, "Branch, tag or commit of the base model.")
    dtype: str = option(
        "auto",
        "Data type of the merged weights. Default: the base model's.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    scale: float = option(1.0, "Factor of the update.")
    standalone: bool = option(
        False, "Whether to write the code of the model class, so that the model loads without this package."
    )
    hub_model_id: str | None = option(None, "Name on the Hub (`user/model`) to push to.")
    hub_private_repo: bool | None = option(None, "Whether a new repository is private.")
    hub_revision: str | None = option(None, "Branch to push to, which is created if it is missing. Default: `main`.")

    def __post_init__(self):
        check_repository(self.hub_model_id)
        if self.hub_revision is not None and self.hub_model_id is None:
            raise UserError("`hub_model_id` must be set if `hub_revision` is set.")


ARGUMENTS = (MergeArguments,)


def main(argv: list[str] | None = None) -> None:
    (args,) = parse(ARGUMENTS, name_words(argv, "adapter"), __doc__)

    # Model and tokenizer
    adapter = find_source(args.adapter, accept=("adapter",), what="adapter")
    adapter.check_mergeable()
    source = adapter.with_base(args.model_name_or_path, args.model_revision)
    print_sentences(source.describe())
    quantization = None if args.model_name_or_path else source.quantization
    model = load(source, dtype=args.dtype, quantization_config=quantization)
    tokenizer = source.load_tokenizer()

    # Merging
    own_folder = Path(args.adapter) if source.repository is None else Path()
    output_dir = args.output_dir or own_folder / MERGED_FOLDER
    if args.output_dir is None and is_checkpoint(own_folder.resolve()):  # which is deleted when newer ones are saved
        own_folder = own_folder.resolve()
        own_folder, output_dir = own_folder.parent, own_folder.with_name(f"{own_folder.name}-merged")
    if args.output_dir is None:
        check_link(output_dir, own_folder)  # a stranger's folder may have one
    is_replaced = integrity.is_saved(output_dir)
    merged = merge_and_save(
        model,
        output_dir,
        tokenizer,
        read_card_fields(source.results_folder, source.columns),
        scale=args.scale,
        standalone=args.standalone,
    )
    replaced = ", and replaces the one that was there" if is_replaced else ""
    factor = "" if args.scale == 1 else f", with {args.scale:g} times the update"
    print_sentences(f"The merged model is in {merged}{factor}{replaced}")

    # Push
    if args.hub_model_id:
        address = push_merged_to_hub(
            merged, args.hub_model_id, private=args.hub_private_repo, revision=args.hub_revision
        )
        print(f"Pushed to {address}")
    print(f"\nNext:\n  {join_command('chat', merged)}   # ask it")


if __name__ == "__main__":
    run_script(main)
