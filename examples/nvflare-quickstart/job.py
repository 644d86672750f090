"""Federated digits with NVIDIA FLARE's own FedAvg, in few bytes: python job.py"""

import argparse

from model import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="as FLARE does it without fedfp8")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--workspace", default="/tmp/nvflare-quickstart")
arguments = parser.parse_args()

recipe = FedAvgRecipe(name="digits", model=Net(), min_clients=2, num_rounds=arguments.rounds, train_script="client.py")
if not arguments.plain:
    import fedfp8.nvflare

    fedfp8.nvflare.add_to(recipe)
run = recipe.execute(SimEnv(num_clients=2, workspace_root=arguments.workspace))
print("results:", run.get_result())
