"""Orders, shipments and reports."""

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

import orders.models


class Migration(migrations.Migration):
    initial = True

    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("item", models.CharField(max_length=100)),
                ("count", models.PositiveIntegerField()),
                ("day", models.DateField(default=orders.models.today)),
            ],
        ),
        migrations.CreateModel(
            name="Report",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("day", models.DateField(unique=True)),
                ("orders", models.PositiveIntegerField()),
                ("shipments", models.PositiveIntegerField()),
                ("term", models.PositiveBigIntegerField()),
            ],
        ),
        migrations.CreateModel(
            name="Shipment",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("shipped_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("shipped_by", models.CharField(max_length=300)),
                (
                    "order",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="shipments", to="orders.order"
                    ),
                ),
            ],
        ),
    ]
