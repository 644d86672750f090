"""fedfp8 in NVIDIA FLARE: an existing PyTorch job sends few bytes both ways.

    recipe = FedAvgRecipe(...)
    fedfp8.nvflare.add_to(recipe)

The job's own code goes on seeing ordinary models. What happens is in `filters.py`: four filters around two links.
"""

from collections.abc import Iterable
from typing import Any

from fedfp8.errors import extra

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
    names = list(tasks)
    clients = clients or getattr(recipe, "min_clients", 0)
    recipe.add_server_output_filter(SendModel(wire, clients, settings), tasks=names)
    recipe.add_server_input_filter(ReceiveUpdate(), tasks=names)
    recipe.add_client_input_filter(ReceiveModel(), tasks=names)
    recipe.add_client_output_filter(SendUpdate(), tasks=names)
    packages = recipe._job.job.app_packages  # sites have fedfp8 installed: the job need not bring its source
    recipe._job.set_app_packages(sorted({*packages, "fedfp8"}))
