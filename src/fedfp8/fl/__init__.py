"""The federated method and the embedded engine. Start reading at `simulate.run_round`."""

from fedfp8.fl.config import METHODS, Config, from_dict, to_dict, with_method, with_settings
from fedfp8.fl.describe import to_toml
from fedfp8.fl.pool import Pool
from fedfp8.fl.presets import PRESETS, preset
from fedfp8.fl.runs import History, resume, run
from fedfp8.fl.task import Metric, Task

__all__ = [
    "METHODS",
    "PRESETS",
    "Config",
    "History",
    "Metric",
    "Pool",
    "Task",
    "from_dict",
    "preset",
    "resume",
    "run",
    "to_dict",
    "to_toml",
    "with_method",
    "with_settings",
]
