"""For programs that keep their own data in Azure Storage: a fence for blobs, and the lease id for native clients."""

from tenure._backends.azure_storage.fence import Fence
from tenure._backends.azure_storage.leases import lease_id

__all__ = ["Fence", "lease_id"]
