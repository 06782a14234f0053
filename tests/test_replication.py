"""docs/replication.md, when.md and README.md say what the file of all measured numbers says."""

import sys

import pandas as pd
import pytest
from conftest import ROOT


FOLDER = ROOT / "docs/replication"


@pytest.fixture(scope="module")
def make():
    sys.path.insert(0, str(FOLDER))  # as of a script that is started there
    try:
        import make

        yield make
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("make", "claims", "runs"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def rows(make):
    return pd.read_csv(make.RUNS)


@pytest.fixture(scope="module")
def texts(make, rows):
    return make.texts(*make.parts(rows))


def test_the_documents_are_written_from_the_file(make, texts):
    for document in make.DOCUMENTS:
        written = document.read_text(encoding="utf-8")
        assert make.filled(written, *texts) == written, document


def test_every_table_and_number_has_a_place(make, texts):
    pages = "".join(document.read_text(encoding="utf-8") for document in make.DOCUMENTS)
    tables, numbers = texts
    assert [name for name in tables if f"<!-- {name}: begin -->" not in pages] == []
    assert [name for name in numbers if f"<!--{name}-->" not in pages] == []


def test_another_number_changes_them(make, rows):
    """The best rate of one method is measured as worse: its rate, its claims and the page's head are others."""
    worse = rows.copy()
    chosen = (worse["study"] == "small") & (worse["method"] == "rslora") & (worse["metric"] == "development")
    rate = worse.loc[worse.loc[chosen, "value"].idxmax(), "learning_rate"]
    worse.loc[chosen & (worse["learning_rate"] == rate), "value"] = 0.0
    tables, _ = make.texts(*make.parts(worse))
    for document in make.DOCUMENTS[:1]:
        written = document.read_text(encoding="utf-8")
        assert make.filled(written, tables, {}) != written


def test_the_page_begins_with_every_verdict_that_the_correction_takes_away(make, rows, texts):
    studies, _, _ = make.parts(rows)
    claims, _ = make.decide(studies)
    taken = claims[claims["alone"] != claims["verdict"]]
    assert set(taken["alone"]) == {"seen", "opposite"}
    tables, _ = texts
    assert [claim.words for claim in taken["claim"] if claim.words[1:] not in tables["summary"]] == []


def test_the_runs_of_a_study_begin_with_one_base(make, rows):
    import runs

    runs.check_bases(rows)
    of_another = (rows["study"] == "huginn") & (rows["metric"] == "frozen_loss") & (rows["method"] == "lora")
    assert of_another.any()
    mixed = rows.assign(value=rows["value"].where(~of_another, 0.7))
    with pytest.raises(ValueError, match="The runs of huginn at 8 loops have other bases"):
        runs.check_bases(mixed)
