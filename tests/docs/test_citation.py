"""Test that README, documentation and package cite the paper in the same way."""

import re
import subprocess
import sys
from importlib.metadata import version

import yaml

import loopdropout_trainer
from helpers.files import ROOT


PAPER = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
NUMBER = PAPER["url"].rpartition("/")[2]


def test_readme_starts_with_citation():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text) <= 8500
    first_screen = " ".join(text[:2100].replace("\n> ", " ").split())
    authors = [f"{author['given-names']} {author['family-names']}" for author in PAPER["authors"]]
    for said in (PAPER["title"], ", ".join(authors), PAPER["url"], str(PAPER["year"]), "NUS-HPC-AI-Lab/loop-dropout"):
        assert said in first_screen
    assert PAPER["identifiers"][0]["value"] == f"arXiv:{NUMBER}"


def test_pages_and_package_cite_paper():
    for path in ("docs/replication.md", "loopdropout_trainer/saving/model_card.jinja"):
        text = " ".join((ROOT / path).read_text(encoding="utf-8").split())
        assert PAPER["title"] in text and PAPER["url"] in text, path
    assert f"arXiv {NUMBER}" in loopdropout_trainer.__doc__


def test_bibtex_is_that_of_the_citation_file():
    text = (ROOT / "docs/citing.md").read_text(encoding="utf-8")
    entry = re.search(r"```bibtex\n@misc\{\w+,\n(.*?)\n\}\n```", text, re.DOTALL)[1]
    authors = [f"{author['given-names']} {author['family-names']}" for author in PAPER["authors"]]
    fields = dict(re.findall(r"^  (\w+) = \{+([^{}]*)\}+,?$", entry, re.MULTILINE))
    assert fields == {
        "title": PAPER["title"],
        "author": " and ".join(authors),
        "year": str(PAPER["year"]),
        "eprint": NUMBER,
        "archivePrefix": "arXiv",
        "url": PAPER["url"],
    }


def test_entry_of_the_package_is_that_of_the_citation_file():
    package = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    text = (ROOT / "docs/citing.md").read_text(encoding="utf-8")
    entry = re.search(r"```bibtex\n@software\{\w+,\n(.*?)\n\}\n```", text, re.DOTALL)[1]
    assert dict(re.findall(r"^  (\w+) = \{+([^{}]*)\}+,?$", entry, re.MULTILINE)) == {
        "title": package["title"],
        "author": package["authors"][0]["name"],
        "year": str(PAPER["year"]),
        "version": package["version"],
        "license": package["license"],
        "note": "Commit COMMIT",
        "url": "ADDRESS",
    }
    assert package["version"] == version("loopdropout-trainer")
    printed = subprocess.run(
        [sys.executable, "-m", "loopdropout_trainer.cli", "--version"], capture_output=True, text=True
    )
    assert ("commit" in printed.stdout) == (ROOT / ".git").exists(), printed
