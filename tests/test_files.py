"""Writing, hashing and checking files."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loopdropout_trainer.saving import files
from loopdropout_trainer.saving.files import check_safetensors, sha256, sha256_of_weights, write_atomically


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_atomically(path, "old é")
    assert path.read_bytes() == "old é".encode()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as broken:
            broken.setattr(os, name, lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(OSError, match="No space"):
                write_atomically(path, "new")
        assert path.read_text(encoding="utf-8") == "old é" and list(tmp_path.iterdir()) == [path]


def test_hashes_are_those_of_the_standard_library(tmp_path):
    content = os.urandom(1 << 20)
    (tmp_path / "b").write_bytes(content)
    (tmp_path / "a").write_bytes(b"first")
    want = hashlib.sha256(content).hexdigest()
    assert sha256(content) == sha256(tmp_path / "b") == want and sha256("é") == sha256("é".encode())
    both = sha256(tmp_path.iterdir())
    assert both == sha256(sorted(tmp_path.iterdir(), reverse=True))
    (tmp_path / "a").rename(tmp_path / "c")
    assert sha256(tmp_path.iterdir()) != both


def test_weights_are_read_once_and_again_when_they_were_written_to(tmp_path, monkeypatch):
    weights, read = tmp_path / "model.safetensors", []
    monkeypatch.setattr(files, "sha256", lambda given: read.append(given) or sha256(given))
    reads = lambda: sum(isinstance(each, Path) for each in read)
    weights.write_bytes(b"1" * 100)
    os.utime(weights, (1, 1))
    first = sha256_of_weights([weights])
    assert sha256_of_weights([weights]) == first and reads() == 1
    assert first == sha256([weights])
    weights.write_bytes(b"1" * 99 + b"2")  # the same size, at a time of its own
    other = sha256_of_weights([weights])
    assert other != first
    # In the Hub's cache the name is the hash.
    blob = tmp_path / sha256(weights)
    weights.rename(blob)
    weights.symlink_to(blob)
    before = reads()
    assert (sha256_of_weights([weights]), reads()) == (sha256([weights]), before)


def test_a_damaged_safetensors_file_is_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(2, 3), "n": torch.arange(4)}, path)
    assert check_safetensors(path, finite=True) == {"a": [2, 3], "n": [4]}
    complete = path.read_bytes()
    for damaged in (b"", complete[:-1], complete[:20], b"\xff" * 100, complete + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read"):
            check_safetensors(path)
    save_file({"a": torch.tensor([1.0, torch.nan])}, path)
    assert check_safetensors(path) == {"a": [2]}
    with pytest.raises(ValueError, match="NaN or infinity in `a`"):
        check_safetensors(path, finite=True)
