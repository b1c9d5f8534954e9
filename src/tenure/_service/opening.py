"""One opening of a service: its backend, from when the service is opened until it is closed, in one process."""

from __future__ import annotations

import os

import tenure
from tenure import Backend
from tenure._runtime.threads import in_thread


class Opening:
    """An open backend, and its view for threads, which is opened when it is first needed."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.pid: int = os.getpid()
        self._for_threads: dict[str, tenure.sync.Backend] = {}  # one at most

    @property
    def blocking(self) -> tenure.sync.Backend:
        """The backend for threads."""
        if not self._for_threads:
            self._for_threads.setdefault("one", tenure.sync.Backend(self.backend))  # in one step, as threads may race
        return self._for_threads["one"].open()

    async def close_view(self) -> None:
        """Close the view for threads."""
        for view in list(self._for_threads.values()):
            # It ends a thread, if one consumes there. Those of the loop may all be busy with the user's calls.
            await in_thread("tenure-closing", view.close)
