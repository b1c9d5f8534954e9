"""Test your own code against a change of leader: a virtual hour takes milliseconds, each seed is another run.

Run it with: pytest -p tenure.testing.pytest_plugin --seeds 20 examples/test_takeover.py
"""

import asyncio
from collections.abc import Callable, Coroutine

import tenure
from tenure.testing import connect_here


async def report(term: tenure.Term, pages: list[tuple[int, int]]) -> None:
    """Write a page a minute; what is under test."""
    for page in range(60):
        term.check()
        pages.append((term.token, page))
        await asyncio.sleep(60)


def test_the_standby_takes_over(
    in_virtual_time: Callable[[Coroutine[None, None, None]], None], memory_url: str
) -> None:
    async def main() -> None:
        time = asyncio.get_running_loop().time
        pages: list[tuple[int, int]] = []
        async with connect_here(memory_url) as ours, connect_here(memory_url) as theirs:
            elections = [backend.election("report") for backend in (ours, theirs)]
            campaigns = [asyncio.ensure_future(each.run(lambda term: report(term, pages))) for each in elections]
            await asyncio.sleep(600)
            changed_at = time()
            await ours.election("report").ask_to_resign()
            async for leader in ours.election("report").observe():
                if leader is not None and leader.token == 2:
                    break
            assert time() - changed_at < 15
            await asyncio.sleep(600)
            assert not any(campaign.done() for campaign in campaigns)
        assert [token for token, page in pages if page == 9] == [1, 2]

    in_virtual_time(main())
