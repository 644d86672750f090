"""Data sets, features, augmentation and partitions.

    data = load("cifar10", data_dir)                            # compact tensors, memory-mapped from a cache
    parts = partition("dirichlet", data.train_y, 100, seed=0)   # one index array per client
    transform = transform_for("cifar10")
    x = transform(data.train_x[parts[3][:50]], generator, train=True)  # float32 batch, augmented

Nothing here imports pyarrow, librosa, PIL, datasets, scikit-learn or matplotlib before it is needed.
"""

from fedfp8.data.datasets import Dataset, load
from fedfp8.data.partition import KINDS, partition
from fedfp8.data.transform import Transform, transform_for

__all__ = ["KINDS", "Dataset", "Transform", "load", "partition", "transform_for"]
