"""For programs that keep their own data in Azure Storage: a fence for blobs, and the lease id for native clients."""

from tenure._backends.azure_storage.fence import Fence
from tenure._backends.azure_storage.leases import TermLike, lease_id
from tenure._public import publish_all

__all__ = ["Fence", "TermLike", "lease_id"]

publish_all(__name__)
