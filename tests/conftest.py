"""What pytest does in this folder. The shared fixtures are in `helpers/fixtures.py`."""

import gc
from collections import defaultdict

import pytest


def pytest_configure(config):
    """Load the fixtures, whose imports take five seconds, except where `-n` has workers that run the tests.

    Garbage is not collected until the tests begin. Imports leave little, and looking for it takes half as long as they do.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        from helpers.processes import BARE_SERVER, LIBRARIES

        gc.disable()
        BARE_SERVER.begin(LIBRARIES)
        config.pluginmanager.import_plugin("helpers.fixtures")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `pairs` run all cases of the first family and one of each other family; the others are slow."""
    tables = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairs"):
            (family,) = {"family", "make_tiny", "base"} & item.callspec.indices.keys()
            tables[item.path, item.originalname, item.callspec.indices[family]].append(item)
    for (*_, place), cases in tables.items():
        for number, item in enumerate(cases):
            if place > 0 and number != place % len(cases):  # another case for each family
                item.add_marker("slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n` the tests of a file run in one process: what they share is made once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_collection_finish():
    """Keep what was imported out of the garbage collections: each training makes two, which would take a third of a second."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # by default Python would look hundreds of times while a table is made
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Keep what a file of tests leaves behind, such as results of libraries, out of the collections as well."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
