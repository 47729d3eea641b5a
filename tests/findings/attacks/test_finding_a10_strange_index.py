"""A hub cache with a strange index is a model that is not whole, not a TypeError."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.hub import files as hub_files
from quire.checkpoints.hub.files import HubName, find_local

COMMIT = "0" * 40


@pytest.mark.parametrize("value", [["x"], {"x": 1}, None, 3, 1.5, True, "other.safetensors"])
def test_an_index_that_names_no_files_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    """Failed: TypeError, unhashable type: 'list'."""
    monkeypatch.setattr(hub_files, "hub_cache", lambda: tmp_path)
    model = tmp_path / "models--a--b"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": value}}))
    assert find_local(HubName("a/b"), 1 << 30) is None
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert find_local(HubName("a/b"), 1 << 30) is not None
