"""How many bytes a message of a run has without the lossless stage.

The paper's gains are those of raw FP8: one byte a weight. A run with the lossless stage on sends the same values in
fewer bytes, so one run serves for both gains if the raw size is known. It is not computed by formula: the run's own
model is quantized and encoded with ``lossless=False`` for each direction, and the payload's length is kept in
``sizes.json``. Raw FP8 codes and raw float32 have the same length in every round, so one measurement is exact. Raw
dithered integers take as many bits as they need, which changes from round to round: no raw size is given for `dq`, nor
for runs with clients of several formats.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedfp8.errors import RunError
from fedfp8.fl.checkpoint import read_config
from fedfp8.fl.config import Config
from fedfp8.fl.federation import FP32
from fedfp8.fl.wires import wire_for
from fedfp8.link.store import read_state, write_atomic
from fedfp8.model.quantized import quantize_state
from fedfp8.model.rounding import ROUNDINGS
from fedfp8.model.state import State
from fedfp8.paper.records import find_runs
from fedfp8.wire import encode

__all__ = ["measure_missing", "measure_sizes", "raw_sizes"]


def measure_sizes(folder: Path) -> dict[str, Any]:
    """Write ``sizes.json`` of a run folder from its checkpoint, unless it is there already; returns its content."""
    path = folder / "sizes.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    checkpoint = folder / "checkpoint"
    try:
        saved = json.loads((checkpoint / "state.json").read_text())
    except OSError as error:
        raise RunError(f"{folder} has no checkpoint to measure message sizes on ({error})") from None
    sizes = raw_sizes(read_config(folder / "config.toml"), read_state(checkpoint / saved["model"]))
    written = datetime.fromtimestamp((folder / "history.jsonl").stat().st_mtime, UTC)
    sizes |= {"measured_on": f"server model after round {saved['round']}", "date": written.date().isoformat()}
    write_atomic(path, json.dumps(sizes, indent=2).encode() + b"\n")
    return sizes


def measure_missing(folder: Path) -> list[Path]:
    """``sizes.json`` for every finished run below `folder` that has a checkpoint but no sizes yet."""
    found = [run.path for run in find_runs(folder) if run.finished and not run.sizes]
    missing = [path for path in found if (path / "checkpoint" / "state.json").exists()]
    for path in missing:
        measure_sizes(path)
    return missing


def raw_sizes(config: Config, state: State) -> dict[str, Any]:
    """``{"down_raw": bytes, "up_raw": bytes}``, or a reason why there is no such number."""
    if any(ROUNDINGS[link.rounding].has_steps for link in (config.up, config.down)):
        return {"reason": "raw dithered integers have another length in every round"}
    if config.clients.formats:
        return {"reason": "clients have several formats"}
    format = config.qat.format if config.prepared else FP32
    wire = wire_for(config, format)
    down = quantize_state(state.with_layout(wire.layout_down(state.layout)), rounding=wire.down)
    up = quantize_state(state.with_layout(wire.layout_up(state.layout)), rounding=wire.up)
    return {"down_raw": len(encode(down, lossless=False)), "up_raw": len(encode(up, lossless=False))}
