import re
from pathlib import Path

from setuptools import find_packages, setup


def package_page() -> str:
    """Return the README without what a page outside of a clone cannot show: the figure, and links to files beside it."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n+", "", (Path(__file__).parent / "README.md").read_text(encoding="utf-8"))
    return re.sub(
        r"\[([^\]]*)\]\((?!https?:)([^)]*)\)", lambda m: m[1] if m[1] == m[2] else f"{m[1]} (`{m[2]}`)", text
    )


# The scripts and YAML files of `recipes/` stand beside the package in a clone, and inside it in a wheel.
setup(
    long_description=package_page(),
    packages=[*find_packages(include=["loopdropout_trainer*"]), "loopdropout_trainer.recipes"],
    package_dir={"loopdropout_trainer.recipes": "recipes"},
)
