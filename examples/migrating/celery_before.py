"""Before: a task with retries, and a job of beat, with Celery on Redis. Needs: pip install 'celery[redis]'"""
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from celery import Celery
from celery.schedules import crontab

app = Celery("shop", broker="redis://127.0.0.1:6379/0")
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.worker_prefetch_multiplier = 1
app.conf.broker_transport_options = {"visibility_timeout": 3600}
app.conf.timezone = "Europe/Berlin"
app.conf.beat_schedule = {"tidy": {"task": "tidy", "schedule": crontab(hour=3, minute=0)}}


@app.task(name="serve", autoretry_for=(OSError,), max_retries=9, retry_backoff=True)
def serve(item: str, count: int) -> None:
    print(f"{count} {item} served")


@app.task(name="tidy")
def tidy() -> None:
    print("tidied up")


def order() -> None:
    serve.delay("kettle", 2)
    serve.apply_async(("cup", 1), countdown=3600)


# celery -A celery_before worker --concurrency 4
# celery -A celery_before beat                      one process, and no more
