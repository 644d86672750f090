"""Federated learning in FP8 (Wang, Berg, Acar and Zhou, 2024): one row of a table with `flwr run`."""
