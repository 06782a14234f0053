"""Importing the package says when an installed library is outside the range that the tests cover."""

import os

from packaging.version import Version
from processes import ENVIRONMENT, ROOT, Program


def import_output(*folders):
    """What `import loopdropout_trainer` writes to standard error, with folders of other distributions in front."""
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT]))}
    program = Program("-c", "import loopdropout_trainer", env=environment, fresh=True)
    assert program.wait() == 0
    return program.stderr


def test_import_warns_about_untested_version(tmp_path):
    folder = tmp_path / "transformers-99.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n")
    (line,) = import_output(tmp_path).splitlines()
    assert "transformers 99.0 is installed" in line and "transformers>=5.16.1,<5.25" in line


def test_import_is_silent_in_tested_range():
    assert import_output() == ""


def test_constraints_pin_every_direct_dependency():
    lines = (ROOT / "constraints.txt").read_text().replace("_", "-").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "evaluate", "deepspeed", "lm-eval"):
        assert Version(pins[name])
