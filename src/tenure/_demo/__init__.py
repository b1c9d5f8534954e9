"""The demonstration behind ``tenure demo``: a real computation, several instances, one leader, and two kill -9.

In reading order: ``job`` and ``computation`` (the work; no tenure in it), ``messages``, ``ledger`` (stores the results,
behind a fence), ``worker``, ``leader`` and ``instance`` (one process), ``processes``, ``faults`` and ``run`` (start,
watch and kill them), ``state`` and ``summary`` (for displays). :mod:`tenure.cli` draws it.
"""
