"""Property tests draw the same examples in every run, so that a green suite stays green; `make test-slow` searches on.

HYPOTHESIS_PROFILE=search draws ten times as many, new ones every time.
"""

import os

from hypothesis import settings

settings.register_profile("fast", derandomize=True, max_examples=200, deadline=None)
settings.register_profile("search", derandomize=False, max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
