"""Local training in FP8 and the coding of its result."""

from fedfp8.flower import client_app

app = client_app()
