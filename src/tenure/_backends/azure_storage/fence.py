"""A fence for data in blobs: refuses writes of an old term, even if its process doesn't know that the term is over."""

from __future__ import annotations

from typing import Any

from azure.core import MatchConditions
from azure.storage.blob.aio import BlobClient

from tenure._backends.azure_storage.client import Refused, unless_refused
from tenure._foreign import Unreadable, digits
from tenure.errors import ConfigError, TermLost, Unavailable

TRIES = 10


class Fence:
    """Guards one blob with the newest token that has written it, which is kept in its metadata.

    ::

        fence = Fence(container.get_blob_client("report.json"))
        await fence.upload(data, term.token)

    Read, comparison and write are one step, by the blob's ETag. It works only if all writers use a fence.

    Args:
        blob: A blob of Microsoft's asynchronous client, with any credential.

    .. versionadded:: 0.1
    """

    def __init__(self, blob: BlobClient) -> None:
        self._blob = blob

    async def upload(self, data: bytes, token: int) -> None:
        """Replace the content by *data*, as the term *token*.

        Raises:
            TermLost: A newer term has written it; nothing was changed.
            Unavailable: Another writer changed the blob during each of ten tries.
            ConfigError: The token that is kept with the blob is unreadable; nothing was changed.
        """
        for _ in range(TRIES):
            found = await unless_refused(self._blob.get_blob_properties(), "BlobNotFound")
            if isinstance(found, Refused):
                metadata: dict[str, str] = {}
                condition: dict[str, Any] = {"overwrite": False}
            else:
                metadata = dict(found.metadata or {})
                condition = {"overwrite": True, "etag": found.etag, "match_condition": MatchConditions.IfNotModified}
            newest = self._newest(metadata.get("tenure_fence", "0"))
            if newest > token:
                raise TermLost(
                    f"a newer term ({newest}) has written {self._blob.blob_name!r}; this one ({token}) is over, and "
                    "nothing was written"
                )
            writing = self._blob.upload_blob(data, metadata={**metadata, "tenure_fence": str(token)}, **condition)
            if not isinstance(await unless_refused(writing, "ConditionNotMet", "BlobAlreadyExists"), Refused):
                return
        raise Unavailable(f"other writers changed {self._blob.blob_name!r} during each of {TRIES} tries; try again")

    def _newest(self, text: str) -> int:
        try:
            return digits(text)
        except Unreadable as error:
            raise ConfigError(
                f"the metadata tenure_fence of the blob {self._blob.blob_name!r} can't be the newest token that has "
                f"written it: {error}; set it to that token"
            ) from error
