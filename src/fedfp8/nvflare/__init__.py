"""fedfp8 in NVIDIA FLARE: an existing PyTorch job sends few bytes both ways.

    recipe = FedAvgRecipe(...)
    fedfp8.nvflare.add_to(recipe)

The job's own code goes on seeing ordinary models. What happens is in `filters.py`: four filters around two links.
"""

from collections.abc import Iterable
from typing import Any

from fedfp8.errors import ConfigError, extra

with extra("nvflare"):
    import nvflare  # noqa: F401

from fedfp8.nvflare.filters import ReceiveModel, ReceiveUpdate, SendModel, SendUpdate

__all__ = ["ReceiveModel", "ReceiveUpdate", "SendModel", "SendUpdate", "add_to"]


def add_to(
    recipe: Any, wire: str = "dq", *, clients: int = 0, tasks: Iterable[str] = ("train",), **settings: Any
) -> None:
    """Let the models of `recipe` travel in few bytes, to the clients and back.

    wire, settings: as of `fedfp8.ServerLink`. clients: how many answer in a round; default: the recipe's min_clients,
    or else all that are connected. tasks: the names of the tasks that carry the model. Filters of your own that change
    a model before it is sent (privacy) are added before this call, those that want to see what arrived after it.
    """
    _refuse_what_cannot_work(recipe)
    names = list(tasks)
    clients = clients or getattr(recipe, "min_clients", 0)
    recipe.add_server_output_filter(SendModel(wire, clients, settings), tasks=names)
    recipe.add_server_input_filter(ReceiveUpdate(), tasks=names)
    recipe.add_client_input_filter(ReceiveModel(), tasks=names)
    recipe.add_client_output_filter(SendUpdate(), tasks=names)
    packages = recipe._job.job.app_packages  # sites have fedfp8 installed: the job need not bring its source
    recipe._job.set_app_packages(sorted({*packages, "fedfp8"}))


# Parts of FLARE that change what crosses the network in a way that leaves nothing to code, or no server to code for.
NOT_WITH = {
    "nvflare.app_common.ccwf.": "its clients send models to each other; fedfp8 codes what server and clients exchange",
    "nvflare.app_opt.he.": "encrypted models cannot be coded",
    "nvflare.app_opt.pt.quantization.": "FLARE's own quantization is in it; take out one of the two",
}


def _refuse_what_cannot_work(recipe: Any) -> None:
    for app in getattr(recipe._job, "_deploy_map", {}).values():
        config = app.app_config
        parts = [flow.controller for flow in getattr(config, "workflows", ())]
        parts += [one for _, filters in config.task_data_filters + config.task_result_filters for one in filters]
        for part, (module, reason) in ((part, item) for part in parts for item in NOT_WITH.items()):
            if any(kind.__module__.startswith(module) for kind in type(part).__mro__):
                name = f"{type(recipe).__name__} ({type(part).__name__})"
                raise ConfigError(f"{name} cannot be used with fedfp8: {reason}")
