"""The whole method as a Flower app: what `fedfp8 run` does, on a Grid, to the same bytes."""
