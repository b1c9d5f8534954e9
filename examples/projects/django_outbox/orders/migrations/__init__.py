"""The tables of the orders; ``apps.py`` adds those of tenure."""
