"""Whether long runs are wanted, as before a release."""

from __future__ import annotations

import os

LONG = os.environ.get("TENURE_LONG", "") not in ("", "0")
"""``TENURE_LONG=1`` lengthens the tests of kills, cuts and simulations, and runs those that take too long otherwise."""
