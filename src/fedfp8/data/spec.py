"""What each data set must look like: names, columns, counts and checksums. Data only.

Checksums are of the *contents* where the authors published some: the decoded CIFAR pixels and labels, written
as in the original binary files, have the original files' digests however the parquet files store them. The
packed subsets that only exist as one set of files (Speech Commands with ten words, small Fashion-MNIST) are
known by the files' SHA-256.
"""

from dataclasses import dataclass, field

__all__ = ["SPECS", "Spec"]


@dataclass(frozen=True)
class Spec:
    """A data set that :func:`fedfp8.data.load` knows."""

    name: str
    about: str
    kind: str  # "digits" (comes with scikit-learn) | "images" | "speech"
    folders: tuple[str, ...] = ()  # below the data directory, best first
    hub: str = ""  # repository on the Hugging Face hub
    hub_files: str = "*.parquet"  # what to fetch from it
    hub_revision: str | None = None
    by_hand: str = ""  # how to get it without the hub; a folder follows
    input: str = ""  # column with the image or the sound
    label: str = "label"
    coarse: str | None = None  # second label, part of CIFAR-100's checksum only
    shape: tuple[int, ...] = ()  # of one decoded image, channels first
    classes: tuple[str, ...] = ()  # used where the files do not name them
    counts: tuple[tuple[int, int], ...] = ()  # allowed (train, test) sizes; empty: whatever is there
    digest: str = ""  # algorithm of `contents`
    contents: tuple[str, ...] = ()  # digests of equal consecutive blocks: train blocks, then the test set
    files: dict[str, str] = field(default_factory=dict)  # folder/file -> SHA-256


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    "T - shirt / top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec(
            name="digits",
            about="handwritten digits 8x8 (scikit-learn); always there",
            kind="digits",
            shape=(1, 8, 8),
            classes=tuple("0123456789"),
            counts=((1437, 360),),
        ),
        Spec(
            name="cifar10",
            about="CIFAR-10, colour images 32x32, 10 classes",
            kind="images",
            folders=("cifar10", "datasets--uoft-cs--cifar10/snapshots/*"),
            hub="uoft-cs/cifar10",
            input="img",
            shape=(3, 32, 32),
            classes=CIFAR10_CLASSES,
            counts=((50_000, 10_000),),
            digest="md5",
            contents=(
                "5dd7e06a14cb22eb9f671a540d1b7c25",
                "5ea93a67294ea407fff1d09f752e9692",
                "942cd6a4bcdd0dd3c604fbe906cb4421",
                "ae636b3ba5c66a11e91e8cb52e771fcb",
                "53f37980c15c3d472c316c40844f3f0d",
                "803d5f7f4d78ea53de84dbe85f74fb6d",
            ),
        ),
        Spec(
            name="cifar100",
            about="CIFAR-100, colour images 32x32, 100 (fine) classes",
            kind="images",
            folders=("cifar100", "datasets--uoft-cs--cifar100/snapshots/*"),
            hub="uoft-cs/cifar100",
            input="img",
            label="fine_label",
            coarse="coarse_label",
            shape=(3, 32, 32),
            classes=tuple(f"class {i}" for i in range(100)),
            counts=((50_000, 10_000),),
            digest="sha1",
            contents=("e207cd2e05b73b1393c74c7f5e7bea451d63e08e", "8fb6623e830365ff53cf14adec797474f5478006"),
        ),
        Spec(
            name="fashion_mnist",
            about="Fashion-MNIST, grey images 28x28, 10 classes; complete or the small subset",
            kind="images",
            folders=(
                "fashion_mnist",
                "datasets--zalando-datasets--fashion_mnist/snapshots/*",
                "fashion_mnist_small",
            ),
            hub="zalando-datasets/fashion_mnist",
            input="image",
            shape=(1, 28, 28),
            classes=FASHION_CLASSES,
            counts=((60_000, 10_000), (4_000, 1_000)),
            files={
                "fashion_mnist_small/test-00000-of-00001.parquet": (
                    "5bdaed774d50cbe357a42039c156ae9ec59a9761fa91ad0146ca5d48b4f64331"
                ),
                "fashion_mnist_small/train-00000-of-00001.parquet": (
                    "8bf11af8c5630503cffd9df8022249b1264f973dd2a0e33fe6e3f2effd4cced2"
                ),
            },
        ),
        Spec(
            name="speech_commands",
            about="Google Speech Commands with speakers; words and speakers as found (v0.02: 35 and 2,112)",
            kind="speech",
            folders=(
                "speech_commands_v0.02",
                "speech_commands",
                "datasets--google--speech_commands/snapshots/*",
                "speech_commands_v0.01_10words",
                "speech_commands_v0.01",
            ),
            hub="google/speech_commands",
            hub_files="v0.02/**",
            hub_revision="refs/convert/parquet",  # the main branch is a loading script
            by_hand=(
                "unpack https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz to"
            ),
            input="audio",
            files={
                "speech_commands_v0.01_10words/test-00000-of-00001.parquet": (
                    "1c0f6028581de1e8c423b4e51b0998e49f9e569789e9e7e9f4dd8ee262db4d0a"
                ),
                "speech_commands_v0.01_10words/train-00000-of-00001.parquet": (
                    "4ab4cd3e5c298cd0614bc1204db72038a0912bdd682c9eebfe40c42ff39a0949"
                ),
            },
        ),
    )
}
