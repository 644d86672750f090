"""A Flower app on scikit-learn's handwritten digits: runs offline, in about a minute."""
