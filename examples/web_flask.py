"""Flask: orders are taken by an endpoint; a worker of its own serves them.

TENURE_URL=sqlite:///work.db gunicorn --workers 4 web_flask:app
TENURE_URL=sqlite:///work.db python web_flask.py
"""

import atexit
from typing import Any

from flask import Flask, request

import tenure.sync

app = Flask(__name__)
backend = tenure.sync.connect()  # to the store that TENURE_URL names
atexit.register(backend.close)


def orders() -> tenure.sync.Queue:
    return backend.open().queue("orders")  # the first call opens it, in each process that the server forks


@app.post("/orders")
def take() -> tuple[dict[str, Any], int]:
    return {"id": orders().send(json=request.get_json())}, 202


def handle(message: tenure.sync.Message) -> None:
    print(f"{message.json()['item']} is served")


if __name__ == "__main__":
    orders().consume(handle)  # until SIGTERM or Ctrl-C
