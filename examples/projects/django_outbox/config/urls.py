"""The addresses of the views."""

from django.urls import path
from orders import views

urlpatterns = [
    path("orders", views.place),
    path("orders/<int:pk>", views.show),
    path("report", views.report),
]
