"""Name the store of the tests before the shop is imported: one in memory."""

import os

os.environ["TENURE_URL"] = "memory:"
os.environ["SHOP_PACKING_SECONDS"] = "0"
