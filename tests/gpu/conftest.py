"""Settings of the frameworks that have to be there before their first use of the GPU."""

from __future__ import annotations

import os

# JAX takes three quarters of the GPU's memory at its first use otherwise, and the tests share it with torch and CuPy.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
