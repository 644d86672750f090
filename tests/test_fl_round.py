"""One round of each method against a straightforward script that follows the paper's formulas, with no shared code.

The script below works in float64 with log2 and autograd, tensor by tensor, holding the whole cohort. It shares nothing
with the package but torch itself; seeds and random bits follow the documented formulas (`rng.py`, `fp8/kernels.py`).

What may differ. Ours computes in float32: values differ by about 1e-7 of their size. A rounding then falls the other
way with a probability of (float32 error) / (step), about 1e-7 / 2**-4 = 2e-6 per element and rounding, plus 2**-16 for
the hair that stochastic rounding leaves at each end of a step. Of the 1,200 weights of two clients we expect well below
one flip, and require: all values within one step, at least 99.5 % (six flips) within 1e-6. An activation that flips in
training (2e-6 of 15,000) would shift many weights by about 1e-5; we expect none, and get none on this machine.
"""

import hashlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedfp8
from fedfp8.fl import preset

SEED, LR, DECAY, BATCH = 5, 0.1, 0.001, 10


def make() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.randn(p.shape, generator=g) * 0.2).clamp(-0.46, 0.46))
            # The largest weight sits on the edge of the range, where gradients are halved. A multiple of 480/2**n comes
            # back from FP8 to the last bit; others may be an ulp inside or outside, and the script would not know.
            p.view(-1)[0] = 0.46875
    sizes = (23, 40, 31, 17)
    return model, [(torch.randn(n, 1, 8, 8, generator=g), torch.randint(4, (n,), generator=g)) for n in sizes]


# The script -----------------------------------------------------------------------------------------------------------


def seed_of(*path) -> int:
    text = "/".join(str(p) for p in path)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def signed_bits(seed: int, n: int) -> torch.Tensor:
    """32 signed random bits per element: SplitMix64 makes two keys; a Weyl sequence and a hash mix in the index."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    h = [(0x9E3779B9 * i + z) % 2**32 for i in range(n)]
    h = [(x ^ x >> 16) * 0x7FEB352D % 2**32 for x in h]
    h = [(x ^ x >> 15 ^ z >> 32) * 0x846CA68B % 2**32 for x in h]
    return torch.tensor([x - 2**32 if x >= 2**31 else x for x in h], dtype=torch.float64)


def step_of(x, alpha):  # equation 4, with the bias b given below it
    bias = 16 - torch.log2(alpha) + torch.log2(torch.tensor(2 - 2.0**-3, dtype=torch.float64)) - 1
    return 2.0 ** (torch.clamp(torch.floor(torch.log2(x.abs()) + bias).detach(), min=1) - bias - 3)


def q_det(x, alpha):  # equation 3, straight-through
    clipped = torch.min(torch.max(x, -alpha), alpha)
    ratio = clipped / step_of(clipped, alpha)
    return step_of(clipped, alpha) * (ratio + (torch.round(ratio) - ratio).detach())


def with_ends(q, x, alpha):  # beyond the range, and at its ends, exactly -alpha and alpha
    return torch.where(x.abs() >= alpha, alpha * x.sign(), q)


def q_rand(x, alpha, seed):  # equation 5: up with probability x/s - floor(x/s)
    s = step_of(x.clamp(-alpha, alpha), alpha)
    u = 0.5 + signed_bits(seed, x.numel()).view(x.shape) / 2**32
    return with_ends(s * torch.floor(x / s + u), x, alpha)


def expected_error(w, target, alpha):
    clipped = w.clamp(-alpha, alpha)
    s = step_of(clipped, alpha)
    f = clipped / s - torch.floor(clipped / s)
    return float(((clipped - target) ** 2 + s**2 * f * (1 - f)).sum())


def dithered(x, step, seed, place, start=0):  # the same bits for both clients, half a cell apart
    bits = signed_bits(seed, start + x.numel())[start:].view(x.shape)
    turned = (bits + 2**31 + place * 2**31) % 2**32
    u = torch.floor(turned / 2**9) / 2**23
    return step * (torch.floor(x / step + u) + 0.5 - u)


def suits(x, largest, inputs):  # the share of kappa that a tensor gets: the root of its inputs, and of its size
    few = min(1.0, 16 * x.numel() / largest)
    return max(1 / 8, (min(1.0, x[0].numel() / inputs) * few) ** 0.5) if x.ndim > 1 else 1 / 8


def sixteen(step):  # the next number that fits into the upper half of a float32
    bits = int(torch.tensor(step, dtype=torch.float32).view(torch.int32))
    return float(torch.tensor((bits + 0xFFFF) >> 16 << 16, dtype=torch.int32).view(torch.float32))


def send(state, method, seed, kappa=0.0, place=0, inputs=228.0):
    """What the receiver decodes."""
    out, largest = dict(state), max(x.numel() for x in state.values())
    ends = {}  # of the random bits of small vectors, and of other small tensors: (seed, how many are taken)
    for index, (name, x) in enumerate(state.items()):
        own_seed, alpha = seed_of(seed, "tensor", index), state.get(name.replace("weight", "alpha"))
        if method == "dq" and "alpha" not in name and "beta" not in name:
            step, start = sixteen(kappa * suits(x, largest, inputs) * float((x**2).mean().sqrt())), 0
            if x.numel() < 1024:
                own_seed, start = ends.get(x.ndim < 2, (own_seed, 0))
                ends[x.ndim < 2] = own_seed, start + x.numel()
            out[name] = dithered(x, step, own_seed, place, start)
        elif method in ("uq", "uq+") and "weight" in name:
            out[name] = q_rand(x, alpha, own_seed)
        elif method == "bq" and "weight" in name:
            out[name] = with_ends(q_det(x, alpha), x, alpha)
    return out


def forward(p, x, fp8):
    def operands(x, layer):
        if not fp8:
            return x, p[f"{layer}.weight"]
        if float(p[f"{layer}.beta"].detach()) == 0:
            p[f"{layer}.beta"].data.fill_(float(x.detach().abs().max()))
        return q_det(x, p[f"{layer}.beta"]), q_det(p[f"{layer}.weight"], p[f"{layer}.alpha"])

    x = F.relu(F.conv2d(*operands(x, 0), p["0.bias"]))
    return F.linear(*operands(x.flatten(1), 3), p["3.bias"])


def local_update(state, x, y, rng, fp8):  # algorithm 1
    p = {name: t.clone().requires_grad_(name != "0.beta") for name, t in state.items()}
    for batch in torch.randperm(len(y), generator=rng).split(BATCH):  # one epoch
        loss = F.cross_entropy(forward(p, x[batch].double(), fp8), y[batch])
        learned = [n for n in p if p[n].requires_grad]
        for name, g in zip(learned, torch.autograd.grad(loss, [p[n] for n in learned]), strict=True):
            decay = DECAY if "weight" in name or "bias" in name else 0.0
            p[name].data -= LR * (g + decay * p[name].data)
    return {name: t.detach() for name, t in p.items()}


def server_optimize(mean, updates, names, seed):  # algorithm 2; the cohort enters only through its mean and its alphas
    for index, name in enumerate(names):
        if "weight" not in name:
            continue
        target, alpha_name, own_seed = mean[name], name.replace("weight", "alpha"), seed_of(seed, "tensor", index)
        w, alpha = target, mean[alpha_name]
        moved = target
        for step in range(5):
            q = q_rand(moved, alpha, seed_of(own_seed, "w", step))
            moved = moved - 0.1 * 2 * (q - target) * (moved.abs() <= alpha)
        best = expected_error(w, target, alpha)
        if expected_error(moved, target, alpha) < best:
            w, best = moved, expected_error(moved, target, alpha)
        low, high = (f([float(u[alpha_name]) for u in updates]) for f in (min, max))
        for candidate in torch.linspace(low, high, 50, dtype=torch.float64):
            if expected_error(w, target, candidate) < best:
                alpha, best = candidate, expected_error(w, target, candidate)
        mean[name], mean[alpha_name] = w, alpha
    return mean


def paper_round(model, clients, method):  # algorithm 3, one round
    fp8 = method != "fp32"
    largest = float(clients[0][0].abs().max())  # of the test set
    state = {}
    for name, p in model.named_parameters():
        state[name] = p.detach().double()
        if fp8 and "bias" in name:
            layer = name[0]
            state[f"{layer}.alpha"] = state[f"{layer}.weight"].abs().max()
            state[f"{layer}.beta"] = torch.tensor(largest if layer == "0" else 0.0, dtype=torch.float64)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed_of(SEED, "sample", 1)))
    cohort = sorted(order[:2].tolist())
    places = torch.randperm(2, generator=torch.Generator().manual_seed(seed_of(SEED, "places", 1))).tolist()
    updates, sizes = [], torch.tensor([float(len(clients[k][1])) for k in cohort], dtype=torch.float64)
    for k, place in zip(cohort, places, strict=True):
        down = send(state, method, seed_of(SEED, "down", 1, "E4M3"), kappa=0.8 * (2 / 5) ** 0.5, place=place)
        rng = torch.Generator().manual_seed(seed_of(SEED, "train", 1, k))
        local = local_update(down, *clients[k], rng, fp8)
        if method == "dq":  # the change, and the server adds it to its own model
            ranges = {n for n in state if "alpha" in n or "beta" in n}
            change = {n: t if n in ranges else t - down[n] for n, t in local.items()}
            change = send(change, method, seed_of(SEED, "up", 1), 1.2 * 2, place, inputs=228 * 25 / 64)
            updates.append({n: t if n in ranges else state[n] + t for n, t in change.items()})
        else:
            updates.append(send(local, method, seed_of(SEED, "up", 1, k)))
    mean = {n: sum(s * u[n] for s, u in zip(sizes / sizes.sum(), updates, strict=True)) for n in state}
    if method == "uq+":
        return server_optimize(mean, updates, list(state), seed_of(SEED, "server", 1))
    return mean


# ----------------------------------------------------------------------------------------------------------------------


def one_round(method: str, **settings) -> fedfp8.fl.History:
    model, clients = make()
    config = preset(
        "digits", method, seed=SEED, clients__fraction=0.5, local__epochs=1, local__batch_size=BATCH, local__lr=LR,
        local__weight_decay=DECAY, round__count=1, **settings,
    )  # fmt: skip
    return fedfp8.run(config, model=model, clients=clients, test=clients[0])


@pytest.mark.parametrize("method", ["fp32", "bq", "uq", "uq+", "dq"])
def test_one_round_equals_the_papers_formulas(method: str) -> None:
    ours, theirs = one_round(method).state, paper_round(*make(), method)
    assert list(ours) == list(theirs)
    equal = total = 0
    for name, mine in ours.items():
        difference = (mine.double() - theirs[name]).abs()
        # A step of the largest binade is 32/480 of alpha; a dithered one is kappa * rms, at most 2.4 * 0.05 here.
        assert float(difference.max()) <= (0.4 if method == "dq" else 0.2), name
        close = difference <= 1e-6 + 1e-6 * theirs[name].abs()
        equal, total = equal + int(close.sum()), total + close.numel()
    assert equal >= 0.995 * total, f"{total - equal} of {total} values differ"


def test_the_script_can_tell_the_methods_apart() -> None:
    """Otherwise the comparison above would prove little."""
    results = [paper_round(*make(), method)["3.weight"] for method in ("fp32", "bq", "uq", "dq")]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert float(((one - other).abs() > 1e-6).double().mean()) > 0.5


def test_server_optimize_changes_the_round() -> None:
    plain, optimized = one_round("uq"), one_round("uq+")
    gain = optimized.rounds[-1]["server_opt"]
    assert gain["gain_alpha_step"] > 0 and plain.state.fingerprint != optimized.state.fingerprint
