"""
Which tests each target runs: ``make quick``, ``make test`` and ``make full``.

A test belongs to ``make test`` unless it is named in ``FULL``; ``make quick`` runs a part of those. An entry names a
folder, a file, or a class or function in a file, whatever its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias, get_args

Target: TypeAlias = Literal["quick", "test", "full"]
TARGETS: tuple[Target, ...] = get_args(Target)

HERE = Path(__file__).parent

QUICK = [
    "unit",
    "properties",
    "scenarios",
    "application",
    "cli",
    "conformance/test_kinds.py",
    "conformance/test_planted_away.py",
    "stores/azure_storage/test_errors.py",
    "stores/azure_storage/test_names.py",
    "stores/etcd/test_client.py",
    "stores/kubernetes/test_records.py",
    "stores/memory",
    "stores/nats/test_connection.py",
    "stores/nats/test_messages.py",
    "stores/peers/test_counting.py",
    "stores/peers/test_machine.py",
    "stores/peers/test_strategies.py",
    "stores/peers/test_wire.py",
    "stores/redis/test_scripts.py",
    "stores/sqlite",
]
"""The folders and files of ``make quick``: machines, units, memory and SQLite. No server is started."""

NOT_QUICK = [
    "application/test_consumer.py::test_a_handler_that_blocks_keeps_its_lock",
    "application/test_consumer.py::test_a_process_is_stopped",
    "application/test_consumer.py::test_a_process_that_dies_harms_its_own_message_only",
    "application/test_consumer.py::test_a_session_in_which_a_thread_runs_on_goes_to_no_other_consumer",
    "application/test_consumer.py::test_a_thread_that_is_stuck_does_not_keep_the_process",
    "application/test_consumer.py::test_no_process_outlives_its_consumer",
    "application/test_consumer.py::test_sigterm_ends_it_gracefully",
    "application/test_elector.py::test_a_thousand_leases_share_their_renewals",
    "application/test_failure_logs.py",
    "application/test_forked.py",
    "application/test_http.py",
    "application/test_partition_threads.py",
    "application/test_processes.py",
    "application/test_sigterm.py",
    "application/test_telemetry.py::test_nothing_is_imported_for_it_when_it_is_off",
    "application/test_threads.py",
    "application/test_queue_threads.py",
    "cli/test_completion.py",
    "cli/test_coordinators.py",
    "cli/test_errors.py",
    "cli/test_foreign_leader.py",
    "cli/test_help.py",
    "cli/test_leases_only.py",
    "cli/test_live.py",
    "cli/test_me.py",
    "cli/test_queues_only.py",
    "cli/test_send_lines.py",
    "unit/test_first_use.py",
    "unit/test_install.py",
    "unit/test_metrics.py::test_a_child_by_fork_counts_on_although_another_thread_counted_then",
    "unit/test_changed.py",
    "unit/test_names.py",
    "stores/peers/test_wire.py::test_a_hundred_thousand_bad_frames_change_nothing",
    "stores/peers/test_wire.py::test_a_known_tag_with_any_fields_is_a_message_or_malformed",
    "unit/test_pytest_plugin.py",
    "unit/test_suite_times.py",
    "unit/test_targets.py",
    "stores/sqlite/test_fence.py::test_no_old_token_passes_when_processes_race",
    "unit/test_warm.py",
    "unit/test_watchdog.py",
]
"""Files and tests of these folders that start processes or servers, or that take a second and more."""

FULL = [
    # clusters of servers, and clients and members that are cut off
    "conformance/test_outages.py",
    "conformance/test_planted_outages.py",
    "conformance/test_rest.py",
    "process/test_coordinators.py",
    "stores/etcd/test_cluster_suites.py",
    "stores/etcd/test_members.py",
    "stores/nats/test_cluster_lease_suites.py",
    "stores/nats/test_cluster_queue_suites.py",
    "stores/nats/test_cluster_rights.py",
    "stores/peers/test_cut.py",
    "stores/redis/test_cluster.py",
    "stores/redis/test_cluster_suites.py",
    "stores/redis/test_sentinel.py",
    "stores/redis/test_unix_socket_suites.py",
    "stores/zookeeper/test_ensemble.py",
    "stores/zookeeper/test_ensemble_suites.py",
    # processes and servers killed, stopped and cut off again and again
    "process/test_handled_again.py",
    "process/test_limits.py",
    "process/test_names.py",
    "process/test_partitions.py",
    "process/test_schedules.py",
    "process/test_service.py::test_a_fleet_loses_nothing_when_instances_are_killed",
    "process/test_store_elections.py",
    "process/test_store_kills.py",
    "process/test_watching.py::test_they_wait_for_a_server_and_outlive_its_restarts",
    "stores/azure_storage/test_elections.py",
    "stores/rabbitmq/test_dead_letters.py::test_a_process_that_dies_in_a_selective_removal_loses_none",
    "stores/rabbitmq/test_dead_letters.py::test_a_process_that_dies_while_it_looks_loses_and_doubles_none",
    "stores/rabbitmq/test_majority.py",
    "stores/rabbitmq/test_processes.py",
    "stores/rabbitmq/test_restart.py",
    "stores/servicebus/test_processes.py",
    # many large messages
    "stores/rabbitmq/test_dead_letters.py::test_many_large_dead_letters_are_never_in_memory_at_once",
    "stores/test_large_dead_letters.py",
    # programs that other teams wrote: clients, and a browser
    "docs/test_alternatives.py::test_a_pair_of_processes_is_judged_right",
    "docs/test_migrating.py",
    "interop/test_golden.py",
    "interop/test_handing_over.py",
    "interop/test_kills.py",
    "process/test_dashboard.py",
    "stores/servicebus/test_library.py",
    # example projects, cold processes of the small examples, and whole sessions at terminals
    "cli/test_coordinators.py::test_an_election_from_its_first_leader_to_its_end",
    "docs/test_examples.py::test_an_example_runs_in_a_cold_process",
    "docs/test_strategies.py::test_three_terminals",
    "docs/test_strategies.py::test_two_terminals_are_enough",
    "docs/test_tutorial.py::test_the_steps_without_a_server",
    "docs/test_troubleshooting.py::test_the_commands_run_and_change_nothing",
    "examples/test_django_outbox.py",
    "examples/test_fastapi_shop.py",
    "examples/test_fleet_without_store.py",
    "examples/test_kubernetes_deployment.py",
    "examples/test_stateful_stream.py",
    "process/test_demo.py::test_it_runs_on_a_server_with_the_shortest_lease_that_this_allows",
    "process/test_demo.py::test_on_a_store_without_queues_the_messages_are_in_a_file",
    # what can happen to the processes of a service, one after the other; make test has one of each kind
    "process/test_probes.py::test_a_command_that_rests_is_live_and_not_ready",
    "process/test_probes.py::test_a_command_that_takes_its_time_to_end_is_live_while_its_term_is_kept",
    "process/test_probes.py::test_a_process_that_is_stopped_is_not_live",
    "process/test_probes.py::test_a_process_whose_work_runs_beyond_its_term_is_not_live",
    "process/test_probes.py::test_without_a_store_it_is_live_and_not_ready",
    "process/test_run.py::test_a_broken_change_does_not_end_what_works",
    "process/test_run.py::test_a_burst_with_kills_is_served_once_and_scaling_in_interrupts_nothing",
    "process/test_run.py::test_a_process_that_hangs_before_it_begins_is_killed",
    "process/test_run.py::test_a_process_that_is_retired_while_it_is_imported_ends",
    "process/test_run.py::test_a_process_that_somebody_stops_is_started_again",
    "process/test_run.py::test_a_signal_to_the_whole_group_of_a_service_manager_is_one_request",
    "process/test_run.py::test_a_supervisor_that_is_stopped_for_a_while_kills_nothing",
    "process/test_run.py::test_an_old_process_is_replaced_once_another_has_begun",
    "process/test_run.py::test_an_order_that_comes_while_the_module_is_imported_is_obeyed",
    "process/test_run.py::test_it_ends_gracefully_when_its_output_is_not_read_any_more",
    "process/test_run.py::test_processes_that_can_not_begin_end_it",
    "process/test_run.py::test_what_else_is_written_to_its_pipe_is_ignored",
    "process/test_run.py::test_what_hangs_at_its_end_is_killed",
    "process/test_run.py::test_with_a_range_it_also_ends_when_all_queues_are_empty",
    "process/test_run.py::test_without_the_supervisor_a_process_that_is_still_imported_ends",
    "process/test_run_http.py::test_a_client_that_says_no_more_keeps_it_not_from_ending",
    "process/test_run_http.py::test_a_process_that_is_stopped_keeps_no_answer_waiting",
    "process/test_run_http.py::test_a_second_signal_still_cancels_the_handlers",
    "process/test_run_http.py::test_a_supervisor_that_is_stopped_and_continued_is_live",
    "process/test_run_http.py::test_counters_never_fall_when_processes_are_killed_replaced_retired_and_end",
    "process/test_run_http.py::test_without_the_supervisor_processes_that_measure_end_too",
    # long simulations, models, and their planted bugs
    "sim/test_fleet.py",
    "sim/test_partitions.py::test_a_planted_bug_is_found",
    "sim/test_partitions.py::test_no_partition_has_two_owners_and_all_are_in_balance_at_last",
    "sim/test_peers.py::test_a_planted_bug_is_found",
    "sim/test_peers.py::test_a_restarted_member_does_not_vote_against_its_lost_promises",
    "sim/test_peers.py::test_the_promises_hold_under_all_faults",
    "sim/test_queue_sim.py::test_a_change_that_breaks_no_promise_is_not_found",
    "sim/test_queue_sim.py::test_a_planted_bug_is_found",
    "sim/test_queue_sim.py::test_all_is_settled_soon_after_the_faults",
    "sim/test_queue_sim.py::test_every_fault_and_every_nature_is_drawn",
    "sim/test_queue_sim.py::test_no_promise_is_broken",
    "sim/test_queue_sim.py::test_the_runs_are_of_many_kinds",
    "sim/test_schedules.py::test_each_slot_is_sent_once",
    "sim/test_schedules.py::test_each_slot_is_sent_once_while_the_plan_changes",
    "sim/test_schedules.py::test_no_slot_is_sent_twice_when_the_clock_of_the_store_is_set",
    "sim/test_schedules.py::test_the_runs_see_what_can_go_wrong",
    "sim/test_sim.py::test_a_planted_bug_is_found",
    "sim/test_sim.py::test_no_promise_is_broken",
    "sim/test_sim.py::test_somebody_leads_soon_after_the_faults",
    "sim/test_sim.py::test_the_runs_are_of_many_kinds",
    "sim/test_sim.py::test_what_breaks_no_promise_is_not_found",
    "stores/peers/test_models.py",
    "unit/test_supervisor.py::test_no_rule_is_broken_whatever_happens",
    # the servers that the tests start
    "process/test_servers.py",
]
"""The tests that only ``make full`` runs."""

LONGEST = [
    "conformance/test_planted_outages.py",
    "process/test_lead.py",
    "process/test_handled_again.py",
    "conformance/test_outages.py",
    "sim/test_peers.py",
    "stores/etcd/test_suites.py",
    "process/test_demo.py",
    "stores/zookeeper/test_suites.py",
    "stores/azure_storage/test_suites.py",
    "stores/peers/test_cut.py",
    "sim/test_sim.py",
    "process/test_coordinators.py",
    "process/test_store_elections.py",
    "stores/servicebus/test_suites.py",
    "stores/rabbitmq/test_suites.py",
    "stores/postgres/test_suites.py",
    "sim/test_queue_sim.py",
    "process/test_store_kills.py",
    "stores/peers/test_models.py",
    "stores/azure_storage/test_elections.py",
    "conformance/test_cost.py",
    "examples/test_kubernetes_deployment.py",
    "examples/test_django_outbox.py",
    "examples/test_fastapi_shop.py",
    "process/test_work.py",
    "process/test_work_locks.py",
    "application/test_threads.py",
    "application/test_processes.py",
    "docs/test_examples.py",
    "examples/test_stateful_stream.py",
    "examples/test_fleet_without_store.py",
    "stores/redis/test_suites.py",
    "stores/redis/test_cluster_suites.py",
    "stores/zookeeper/test_ensemble_suites.py",
    "stores/etcd/test_cluster_suites.py",
    "stores/zookeeper/test_zookeeper.py",
    "stores/zookeeper/test_ensemble.py",
    "stores/test_wrong_inputs.py",
    "process/test_servers.py",
    "interop/test_handing_over.py",
    "interop/test_kills.py",
]
"""The files that take half a minute and more, the longest first, those that mostly wait between those that compute."""


def may_have(target: Target, path: str) -> bool:
    """Return whether a folder or a file may have tests of *target*, so that it must be looked into."""
    if target == "quick":
        return (is_below(path, QUICK) or is_above(path, QUICK)) and not is_below(path, [*NOT_QUICK, *FULL])
    if target == "test":
        return not is_below(path, FULL)
    return is_below(path, FULL) or is_above(path, FULL)


def has(target: Target, test: str) -> bool:
    """Return whether a test, as ``file::function`` or ``file::class::function``, is one of *target*."""
    if target == "quick":
        return is_below(test, QUICK) and not is_below(test, [*NOT_QUICK, *FULL])
    return is_below(test, FULL) == (target == "full")


def is_below(path: str, entries: Iterable[str]) -> bool:
    """Return whether *path* is an entry, or in one."""
    return any(path == entry or path.startswith((f"{entry}/", f"{entry}::")) for entry in entries)


def is_above(path: str, entries: Iterable[str]) -> bool:
    """Return whether an entry is in the folder or file *path*."""
    return any(entry.startswith((f"{path}/", f"{path}::")) for entry in entries)


def missing() -> list[str]:
    """Return the entries of files and tests that don't exist."""
    return [entry for entry in (*QUICK, *NOT_QUICK, *FULL, *LONGEST) if not is_there(entry)]


def is_there(entry: str) -> bool:
    """Return whether a folder, a file, or a class or function in a file exists."""
    file, *names = entry.split("::")
    path = HERE / file
    if not names:
        return path.exists()
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return all(f"def {name}(" in text or f"class {name}(" in text or f"class {name}:" in text for name in names)
