"""For trying and testing apps on one machine: a Grid in this process, and a SuperLink with SuperNodes as processes.

`fedfp8 flower run` has them as the engines "grid" and "deploy". A real deployment uses none of it.
"""
