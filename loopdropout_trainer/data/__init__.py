"""From raw rows to the examples that the trainer takes."""

from loopdropout_trainer.data.load import DataArguments as DataArguments
from loopdropout_trainer.data.load import LoadedData as LoadedData
from loopdropout_trainer.data.load import load_data as load_data
from loopdropout_trainer.data.rows import DataError as DataError
from loopdropout_trainer.settings.tokenizer import chat_template as chat_template
from loopdropout_trainer.settings.tokenizer import check_vocabulary as check_vocabulary
from loopdropout_trainer.settings.tokenizer import load_tokenizer as load_tokenizer
from loopdropout_trainer.settings.tokenizer import set_chat_template as set_chat_template
