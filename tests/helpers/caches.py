"""Results that libraries compute again for each training or checkpoint, kept for all tests of a process.

They depend on their arguments alone: jinja2 compiles the templates of the cards again for each folder that is written,
accelerate parses the metadata of PEFT each time it looks at a model, a run writes the versions of libraries at each step of
its life, which are in their metadata, too, and dill disassembles each function of a data set again.
Together they take a tenth of a short training.
"""

import functools
import importlib.metadata

import dill.detect
import jinja2


def keep_results():
    jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.distribution = functools.cache(importlib.metadata.distribution)
    importlib.metadata.Distribution.version = property(functools.cache(importlib.metadata.Distribution.version.fget))
    dill.detect.nestedglobals = _nested_globals


@functools.cache
def _names_in(code, recurse, disassemble=dill.detect.nestedglobals):
    return tuple(disassemble(code, recurse))


def _nested_globals(function, recurse=True):
    code = dill.detect.code(function)
    return [] if code is None else [*_names_in(code, recurse)]
