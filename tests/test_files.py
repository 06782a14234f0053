"""Writing and hashing files."""

import hashlib
import os
import resource

import pytest

from loopdropout_trainer.errors import sentence
from loopdropout_trainer.evaluation.benchmark import AnswerLog
from loopdropout_trainer.saving import files
from loopdropout_trainer.saving.files import sha256, sha256_of_json, sha256_of_weights, write_atomically


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_atomically(path, "old é")
    assert path.read_bytes() == "old é".encode()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as broken:
            broken.setattr(os, name, lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(OSError, match="No space") as error:
                write_atomically(path, "new")
            assert error.value.filename == str(path)
        assert path.read_text(encoding="utf-8") == "old é" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file_of_the_answers(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = AnswerLog(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError) as error:
            log.keep([(0, "x" * 200)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path}/00000.jsonl cannot be used: " in sentence(error.value)


def test_hashes_are_those_of_the_standard_library_and_weights_are_read_once(tmp_path, monkeypatch):
    weights, read = tmp_path / "model.safetensors", []
    weights.write_bytes(b"1" * 100)
    os.utime(weights, (1, 1))
    assert sha256(weights) == hashlib.sha256(b"1" * 100).hexdigest()
    monkeypatch.setattr(files, "sha256", lambda path: read.append(path) or sha256(path))
    first = sha256_of_weights([weights])
    assert sha256_of_weights([weights]) == first and len(read) == 1
    assert first == sha256_of_json({weights.name: sha256(weights)})
    weights.write_bytes(b"1" * 99 + b"2")  # the same size, at a time of its own
    assert sha256_of_weights([weights]) != first
    blob = tmp_path / sha256(weights)  # in the Hub's cache the name is the hash
    weights.rename(blob)
    weights.symlink_to(blob)
    before = len(read)
    assert sha256_of_weights([weights]) == sha256_of_json({weights.name: sha256(weights)})
    assert len(read) == before
