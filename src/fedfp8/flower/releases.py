"""What has moved between the releases of Flower that we serve (1.28 to 1.42)."""

import logging

__all__ = ["Run", "be_in_a_run", "log", "parameters_to_arrayrecord"]

log = logging.getLogger("flwr").log  # Flower's own log, under the name that it has had all along

try:
    from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
except ImportError:
    from flwr.common.recorddict_compat import parameters_to_arrayrecord

try:
    from flwr.supercore.run import Run
except ImportError:
    from flwr.common.typing import Run


def be_in_a_run() -> None:
    """A Message may only be made inside a run (from 1.37 on); this process is one from here on."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
