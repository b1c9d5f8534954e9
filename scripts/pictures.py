"""Take the pictures of docs/images: the dashboard of a small fleet, in Chromium. Run by hand; it takes a minute."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser import Browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
URL, PORT = "sqlite:///shop.db", "18161"
OPTIONS = ["--allow-changes", "--show-bodies"]
WATCHED = 40.0
"""Seconds for which the fleet is watched, so that the graphs have a form."""

FLEET = """
import asyncio, random, sys
from dataclasses import dataclass
import tenure

service = tenure.Service(sys.argv[1])

@dataclass
class Order:
    item: str
    count: int = 1

orders = service.queue("orders", Order, max_deliveries=2)
receipts = service.queue("receipts", str)

@service.handler(orders, concurrency=4, retry=tenure.RetryPolicy(0.05))
async def serve(order: Order) -> None:
    await asyncio.sleep(random.uniform(0.05, 0.3))
    if order.count > 9:
        raise LookupError(f"there are no {order.count} {order.item}s in the store")
    await receipts.send(f"{order.count} {order.item}")

@service.handler(receipts, concurrency=2)
async def write(receipt: str) -> None:
    await asyncio.sleep(0.1)

@service.leader("shop", ttl=15, metadata={"address": "10.0.0.7:8080"}, label="shop-1")
async def sell(term: tenure.Term) -> None:
    while True:
        for _ in range(random.choice([0, 0, 3, 12, 40])):
            await orders.send(Order(random.choice(["kettle", "cup", "spoon"]), random.randint(1, 10)))
        await asyncio.sleep(2)

@service.every("0 3 * * *", timezone="Europe/Berlin")
async def tidy() -> None: ...

@service.every(60)
async def count_stock() -> None: ...

service.run()
"""


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        lines = [[sys.executable, "-c", FLEET, URL]] * 2
        lines.append([sys.executable, "-m", "tenure.cli", "dashboard", "--on", URL, "--listen", PORT, *OPTIONS])
        started = []
        try:
            for line in lines:
                started.append(subprocess.Popen(line, cwd=folder, stderr=subprocess.DEVNULL))
                time.sleep(2)
            take_pictures()
        finally:
            for one in started:
                one.terminate()
            for one in started:
                one.wait()


def take_pictures() -> None:
    with Browser() as browser:
        browser.resize(1120, 640)
        browser.prefer("light")
        browser.open(f"http://127.0.0.1:{PORT}/")
        time.sleep(WATCHED)
        browser.screenshot(IMAGES / "dashboard.png")
        browser.prefer("dark")
        browser.resize(1120, 900)
        browser.open(f"http://127.0.0.1:{PORT}/queue?name=orders")
        browser.until_shown("max_deliveries")
        browser.screenshot(IMAGES / "dashboard-queue-dark.png")
        browser.resize(400, 780)
        browser.prefer("light")
        letter = browser.evaluate("document.querySelector('#dead td a').href")
        browser.open(letter)
        browser.screenshot(IMAGES / "dashboard-dead-letter-narrow.png")


if __name__ == "__main__":
    main()
