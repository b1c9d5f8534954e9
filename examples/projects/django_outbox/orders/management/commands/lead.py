"""``manage.py lead``: one of any number of candidates."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from orders.reports import write_report

import tenure.sync


class Command(BaseCommand):
    help = "Keep the report of the day up to date while this process leads, until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--every", type=float, default=5, metavar="SECONDS")

    def handle(self, *args: Any, **options: Any) -> None:
        def lead(term: tenure.sync.Term) -> None:
            while not term.lost.is_set():
                write_report(term.token)  # at first at once, so that older leaders are refused from now on
                term.lost.wait(options["every"])

        with tenure.sync.connect() as backend:  # to the store that TENURE_URL names
            backend.election("report", ttl=5).run(lead)
