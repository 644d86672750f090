"""What every site runs: plain FLARE Client API, nothing of fedfp8."""

import nvflare.client as flare
import torch
from model import Net, digits
from torch.nn.functional import cross_entropy

flare.init()
site = int(flare.get_site_name().rpartition("-")[2]) - 1
images, labels, test_images, test_labels = digits(site, sites=2)
torch.set_num_threads(1)  # the simulator runs several sites on one machine
torch.manual_seed(site)
model = Net()
while flare.is_running():
    received = flare.receive()
    model.load_state_dict(received.params)
    model.eval()
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"accuracy {accuracy:.4f} of the model of round {received.current_round}", flush=True)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in torch.randperm(len(labels)).split(32):
            if len(batch) > 1:
                optimizer.zero_grad()
                cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
    steps = 2 * len(labels) // 32
    flare.send(
        flare.FLModel(
            params=model.state_dict(), metrics={"accuracy": accuracy}, meta={"NUM_STEPS_CURRENT_ROUND": steps}
        )
    )
