"""Training data: from rows to examples in TRL's formats, with held-out examples and exact masks of the trained tokens.

`preparations.py` is the page to extend. It says how rows become examples.
"""

from loopdropout_trainer.data.arguments import (
    DataArguments,
    DPODataArguments,
    GRPODataArguments,
    SFTDataArguments,
)
from loopdropout_trainer.data.examples import LeftOut
from loopdropout_trainer.data.files import read_files
from loopdropout_trainer.data.formats import to_messages
from loopdropout_trainer.data.holding_out import (
    Indices,
    draw_random,
    hold_out_after_100k,
    hold_out_first,
    hold_out_random,
    random_order,
)
from loopdropout_trainer.data.loaded import LoadedExamples
from loopdropout_trainer.data.loading import load_datasets, load_examples
from loopdropout_trainer.data.mixing import Losses
from loopdropout_trainer.data.preparations import (
    FIELD,
    PREPARATIONS,
    PROMPT_TEMPLATES,
    Example,
    Preparation,
    Row,
    fill,
    find_columns,
    is_short_gsm,
    make_arithmetic_pair,
    make_gsm8k_example,
    make_metamath_example,
    make_own_example,
    make_pair,
    make_tulu2_example,
    remove_calculations,
)
from loopdropout_trainer.data.tokenizing import label_example, preview, tokenize


__all__ = [
    "FIELD",
    "PREPARATIONS",
    "PROMPT_TEMPLATES",
    "DPODataArguments",
    "DataArguments",
    "Example",
    "GRPODataArguments",
    "Indices",
    "LeftOut",
    "LoadedExamples",
    "Losses",
    "Preparation",
    "Row",
    "SFTDataArguments",
    "draw_random",
    "fill",
    "find_columns",
    "hold_out_after_100k",
    "hold_out_first",
    "hold_out_random",
    "is_short_gsm",
    "label_example",
    "load_datasets",
    "load_examples",
    "make_arithmetic_pair",
    "make_gsm8k_example",
    "make_metamath_example",
    "make_own_example",
    "make_pair",
    "make_tulu2_example",
    "preview",
    "random_order",
    "read_files",
    "remove_calculations",
    "to_messages",
    "tokenize",
]


def __dir__() -> list[str]:
    return sorted(__all__)
