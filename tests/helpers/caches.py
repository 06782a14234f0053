"""Results that libraries compute again for each training or checkpoint, kept for all tests of a process.

They depend on their arguments alone: jinja2 compiles the templates of the cards again for each folder that is written,
accelerate parses the metadata of PEFT each time it looks at a model, a run writes the versions of libraries at each step of
its life, which are in their metadata, too, dill disassembles each function of a data set again, and TRL tokenizes the same
rows for each trainer. Together they take a fifth of a short training.
"""

import functools
import importlib.metadata

import dill.detect
import jinja2
from datasets import Dataset
from trl import SFTTrainer


def keep_results():
    jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.distribution = functools.cache(importlib.metadata.distribution)
    importlib.metadata.Distribution.version = property(functools.cache(importlib.metadata.Distribution.version.fget))
    dill.detect.nestedglobals = _nested_globals
    SFTTrainer._prepare_dataset = _keep_rows_of_maps(SFTTrainer._prepare_dataset)


@functools.cache
def _names_in(code, recurse, disassemble=dill.detect.nestedglobals):
    return tuple(disassemble(code, recurse))


def _nested_globals(function, recurse=True):
    code = dill.detect.code(function)
    return [] if code is None else [*_names_in(code, recurse)]


def _keep_rows_of_maps(prepare, map_rows=Dataset._map_single):
    """Let a preparation take the rows of a function that it has applied to the same rows before.

    So does the library with rows in files. Their fingerprint has the rows, the function and all that it reads. A test of what
    the function logs has rows of its own.
    """
    kept = {}

    @functools.wraps(map_rows)
    def map_rows_once(**options):
        key = options["new_fingerprint"]
        if key not in kept:
            kept[key] = [*map_rows(**options)]
        yield from kept[key]

    @functools.wraps(prepare)
    def prepare_with_kept_rows(*given, **options):
        Dataset._map_single = staticmethod(map_rows_once)
        try:
            return prepare(*given, **options)
        finally:
            Dataset._map_single = staticmethod(map_rows)

    return prepare_with_kept_rows
