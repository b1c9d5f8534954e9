"""One PostgreSQL database, named by ``TENURE_URL``, keeps the orders and the messages about them."""

import os

from psycopg.conninfo import conninfo_to_dict

options = conninfo_to_dict(os.environ["TENURE_URL"])  # postgresql://user:password@host:5432/database
DATABASES = {
    "default": {"ENGINE": "django.db.backends.postgresql", "NAME": options.pop("dbname"), "OPTIONS": options},
}
SECRET_KEY = os.environ.get("SECRET_KEY", "for this example only")
DEBUG = False
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
INSTALLED_APPS = ["orders"]
MIDDLEWARE: list[str] = []  # it is called by programs, without sessions and cookies, so there is no CSRF to prevent
ROOT_URLCONF = "config.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {name: {"handlers": ["console"], "level": "INFO"} for name in ("orders", "tenure")},
}

SHIPPING_SECONDS = float(os.environ.get("SHIPPING_SECONDS", "2"))
