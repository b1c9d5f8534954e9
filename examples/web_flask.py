"""Flask: orders are taken by an endpoint; a worker of its own serves them.

TENURE_URL=sqlite:///work.db gunicorn --workers 4 web_flask:app
TENURE_URL=sqlite:///work.db python web_flask.py
"""

import atexit
from dataclasses import dataclass
from typing import Any

from flask import Flask, request

import tenure.sync


@dataclass
class Order:
    item: str
    count: int = 1


app = Flask(__name__)
service = tenure.sync.Service()  # on the store that TENURE_URL names
orders = service.queue("orders", Order)
atexit.register(service.close)


@app.before_request
def open_service() -> None:
    service.open()  # in each process that the server forks; it returns at once if it is open


@app.post("/orders")
def take() -> tuple[dict[str, Any], int]:
    order = Order(request.form["item"], request.form.get("count", 1, type=int))
    return {"id": orders.send(order)}, 202


@service.handler(orders)
def serve(order: Order) -> None:
    print(f"{order.count} × {order.item} served")


if __name__ == "__main__":
    service.run()  # until SIGTERM or Ctrl-C
