from setuptools import find_packages, setup


# The scripts and YAML files of `recipes/` stand beside the package in a clone, and inside it in a wheel.
setup(
    packages=[*find_packages(include=["loopdropout_trainer*"]), "loopdropout_trainer.recipes"],
    package_dir={"loopdropout_trainer.recipes": "recipes"},
)
