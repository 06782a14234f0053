"""A tokenizer with one token for each byte."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(special, more=(), merges=(), **names):
    """One token for each byte, and `more` that `merges` make: tokenizes any text and needs no file."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *more]
    backend = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def make_tokenizer():
    return byte_tokenizer(["<eos>", "<pad>"], eos_token="<eos>", pad_token="<pad>")
