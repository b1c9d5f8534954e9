"""One opening of a service: its backend, from when the service is opened until it is closed, in one process."""

from __future__ import annotations

import os

import tenure.sync
from tenure import Backend
from tenure._runtime.threads import in_thread


class Opening:
    """An open backend, and its view for threads, which is opened when it is first needed."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.pid: int = os.getpid()
        self._for_threads = tenure.sync.Backend(backend)
        self._is_used_from_threads = False

    @property
    def blocking(self) -> tenure.sync.Backend:
        """The backend for threads."""
        self._is_used_from_threads = True
        return self._for_threads.open()

    async def close_view(self) -> None:
        """Close the view for threads."""
        if self._is_used_from_threads:
            # It ends a thread, if one consumes there. Those of the loop may all be busy with the user's calls.
            await in_thread("tenure-closing", self._for_threads.close)
