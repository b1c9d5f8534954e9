"""The demonstration behind ``tenure demo``: a real computation, several instances, one leader, and a kill -9.

In reading order: ``job`` and ``computation`` (what is done; no election in it), ``ledger`` (where it is written down,
behind a fence), ``instance`` (who does it), ``stage`` and ``director`` (who starts, watches and kills), ``scene`` and
``summary`` (what there is to see). How it looks is a matter of :mod:`tenure.cli`.
"""
