"""Experiments: the paper's tables and figures as commands, and reports drawn from the records of runs.

Two halves. `records`, `compare`, `tables`, `plots`, `paper` and `report` read files and never import torch, so a report
can be made where the training was not. `jobs`, `reproduce`, `estimate`, `sizes`, `figure3` and `theory` compute.
"""
