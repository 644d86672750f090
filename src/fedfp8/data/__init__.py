"""Data sets, features, augmentation and partitions.

    data = load("cifar10", data_dir)                            # compact tensors, memory-mapped from a cache
    parts = partition("dirichlet", data.train_y, 100, seed=0)   # one index array per client
    transform = transform_for("cifar10")
    x = transform(data.train_x[parts[3][:50]], generator, train=True)  # float32 batch, augmented

Nothing here imports pyarrow, librosa, PIL, datasets, scikit-learn or matplotlib before it is needed.
"""

from fedfp8.data.datasets import Dataset, by_file, load
from fedfp8.data.features import FEATURES, MFCC
from fedfp8.data.manage import Check, Listing, check, fetch, list_datasets
from fedfp8.data.partitions import KINDS, partition
from fedfp8.data.report import ClientRow, PartitionReport, draw_partition, partition_report
from fedfp8.data.transform import Transform, transform_for

__all__ = [
    "FEATURES",
    "KINDS",
    "MFCC",
    "Check",
    "ClientRow",
    "Dataset",
    "Listing",
    "PartitionReport",
    "Transform",
    "by_file",
    "check",
    "draw_partition",
    "fetch",
    "list_datasets",
    "load",
    "partition",
    "partition_report",
    "transform_for",
]
