"""Importing the package says when an installed library is outside the range that the tests cover."""

import os
import subprocess
import sys
from pathlib import Path

from packaging.version import Version


ROOT = Path(__file__).parents[1]


def import_output(path=None):
    """What `import loopdropout_trainer` writes to standard error, with a folder of other distributions in front."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-c", "import loopdropout_trainer"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr


def test_import_warns_about_untested_version(tmp_path):
    folder = tmp_path / "transformers-99.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n")
    lines = import_output(str(tmp_path)).splitlines()
    assert len(lines) == 1
    assert "transformers 99.0 is installed" in lines[0]
    assert "transformers>=5.16.1,<5.25" in lines[0]


def test_import_is_silent_in_tested_range():
    assert import_output() == ""


def test_constraints_pin_every_direct_dependency():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "evaluate", "deepspeed", "lm-eval"):
        assert Version(pins.get(name, pins.get(name.replace("-", "_"))))
