"""What holds for every test: nothing is asked of a model hub."""

from __future__ import annotations

import os

# Set before Transformers is imported anywhere: a test must not depend on what a hub answers today.
os.environ["HF_HUB_OFFLINE"] = "1"
