"""Compare the installed libraries with the versions that the tests cover."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


logger = logging.getLogger(__name__)


def warn_about_untested_versions() -> None:
    """Log a warning for each dependency whose installed version is outside the range of `setup.cfg`.

    pip keeps to these ranges. An installation with `--no-deps`, or a later upgrade of one library, does not.
    """
    try:
        requirements = requires("loopdropout-trainer") or []
    except PackageNotFoundError:  # a source tree on the path, without an installation
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None:  # an extra
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            logger.warning(
                "%s %s is installed, and this package is tested with %s%s. Results may be wrong: see constraints.txt.",
                requirement.name,
                installed,
                requirement.name,
                ",".join(sorted(map(str, requirement.specifier), reverse=True)),
            )
