"""From raw rows to the examples that the trainer takes."""

from loopdropout_trainer.data.arguments import DataArguments
from loopdropout_trainer.data.load import LoadedData, load_data
from loopdropout_trainer.data.rows import DataError
from loopdropout_trainer.data.templates import chat_template, load_tokenizer, set_chat_template


__all__ = [
    "DataArguments",
    "DataError",
    "LoadedData",
    "chat_template",
    "load_data",
    "load_tokenizer",
    "set_chat_template",
]
