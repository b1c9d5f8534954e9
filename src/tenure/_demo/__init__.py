"""The demonstration behind ``tenure demo``: a real computation, several instances, one leader, and two kill -9.

In reading order: ``job`` and ``computation`` (what is done; no tenure in it), ``messages`` (what travels), ``ledger``
(where it is written down, behind a fence), ``worker``, ``leader`` and ``instance`` (who does it), ``stage`` and
``director`` (who starts, watches and kills), ``scene`` and ``summary`` (what there is to see). How it looks is a matter
of :mod:`tenure.cli`.
"""
