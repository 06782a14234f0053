"""Files in the folder of a data set that `datasets` does not read, because they are of another kind or have another name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import logging

from loopdropout_trainer.data.sources import DataSource, file_kind
from loopdropout_trainer.errors import join_words


if TYPE_CHECKING:
    from datasets import DatasetBuilder

logger = logging.get_logger(__name__)

_FACTS = {"dataset_infos.json", "dataset_info.json", "state.json"}
"""Files in which `datasets` itself describes a data set."""

_MOST_NAMES = 5
"""Number of files that the warning names."""


def warn_of_unread(source: DataSource, builder: DatasetBuilder) -> None:
    """Log the data files of a folder that no split has: `datasets` reads one kind, and prefers names such as train.jsonl.

    A folder with a README.md can choose its files there, and `data_files` and `data_dir` choose them, too.

    Args:
        source: Source of the data, whose path is a folder.
        builder: Builder of `datasets`, which has found the files of the folder.
    """
    folder = Path(source.path)
    is_chosen = source.data_files is not None or source.data_dir is not None or (folder / "README.md").is_file()
    if is_chosen:
        return
    read = {Path(file).resolve() for split in builder.config.data_files.values() for file in split}
    unread = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith((".", "_")) for part in name.parts)
        is_data = path.is_file() and file_kind(path.name) is not None and path.name not in _FACTS
        if is_data and not is_hidden and path.resolve() not in read:
            unread.append(str(name))
    if not unread:
        return
    names = unread[:_MOST_NAMES]
    if len(unread) > len(names):
        names.append(f"{len(unread) - len(names):,} more")
    logger.warning_once(
        f"Not read in the folder {source.path}: {join_words(names)}. `datasets` reads files of one kind in a folder, and "
        "prefers names such as train.jsonl. To read other files, name them in `train_files`."
    )
