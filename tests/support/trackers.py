"""What the real packages of the trackers have kept: W&B's offline files, and MLflow's files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run
from wandb.proto.wandb_internal_pb2 import Record

# Of LevelDB's log format, which W&B's files have behind seven bytes of their own.
_BLOCK, _HEADER, _MAGIC = 32768, 7, 7
_LAST_TYPES = {1, 4}  # a whole record, or the last part of one


def wandb_records(directory: Path) -> Iterator[Record]:
    """The records of a W&B run's file."""
    (file,) = directory.glob("run-*.wandb")
    content, position, parts = file.read_bytes(), _MAGIC, b""
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in _LAST_TYPES:
            yield Record.FromString(parts)
            parts = b""


def wandb_rows(directory: Path) -> list[dict[str, Any]]:
    """The logged lines of a W&B run, without what W&B adds to them."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(directory)
        if record.HasField("history")
    ]


def wandb_runs(directory: Path) -> list[Path]:
    """The offline W&B runs in a directory, such as `tracking` of a run, the first one first."""
    return sorted(Path(directory, "wandb").glob("offline-run-*"))


def mlflow_environment(directory: Path) -> dict[str, str]:
    """With MLflow's runs in files: its databases and its server need far more packages."""
    return {"MLFLOW_TRACKING_URI": f"file://{directory}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}


def mlflow_runs(directory: Path, monkeypatch: Any) -> tuple[MlflowClient, list[Run]]:
    """The runs there, of our experiment."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(f"file://{directory}/mlruns")
    experiment = client.get_experiment_by_name("torchrelay")
    return client, client.search_runs([experiment.experiment_id]) if experiment else []
