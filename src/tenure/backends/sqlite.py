"""For programs that keep their own data in the SQLite file beside tenure's: a fence, and settling in a transaction."""

from tenure._backends.sqlite.fence import Fence
from tenure._backends.sqlite.transaction import Held, Within, transact
from tenure._public import publish_all

__all__ = ["Fence", "Held", "Within", "transact"]

publish_all(__name__)
