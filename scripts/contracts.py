"""Two contracts for import-linter: some packages may use public names only; no modules import each other."""

from collections import deque
from collections.abc import Mapping, Set
from itertools import pairwise
from typing import Any, cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class PublicNamesContract(Contract):
    """
    Forbid the interfaces to import, directly, any module of tenure that is not public. An interface may be missing.

    An interface may import its own modules. ``exceptions`` are written ``importing package -> imported module``; an
    exception that no import needs is refused.
    """

    type_name = "public_names"

    interfaces = fields.ListField(subfield=fields.StringField())
    public = fields.ListField(subfield=fields.StringField())
    exceptions = fields.ListField(subfield=fields.StringField(), default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        exceptions = [tuple(line.split(" -> ")) for line in cast("list[str]", self.exceptions)]
        illegal, needed = [], set()
        for interface in cast("list[str]", self.interfaces):
            excepted = [imported for importer, imported in exceptions if importer == interface]
            allowed = [interface, *cast("list[str]", self.public), *excepted]
            for importer in sorted(graph.modules):
                if not within(importer, interface):
                    continue
                for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                    ours = within(imported, "tenure")
                    if ours and imported != "tenure" and not any(within(imported, name) for name in allowed):
                        illegal.append((importer, imported, lines(graph, importer, imported)))
                    needed |= {(interface, name) for name in excepted if within(imported, name)}
        needless = [" -> ".join(exception) for exception in exceptions if exception not in needed]
        return ContractCheck(kept=not illegal and not needless, metadata={"illegal": illegal, "needless": needless})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported, where in check.metadata["illegal"]:
            output.print_error(f"{importer} is not allowed to import {imported} ({where}): it is not a public name")
        for line in check.metadata["needless"]:
            output.print_error(f"no import needs the exception {line}: remove it")


class NoCyclesContract(Contract):
    """
    Forbid modules to import each other, also by imports for type checkers only and by imports inside functions.

    Python accepts a cycle with such an import, which runs late or never; but none of its modules can be read, typed or
    moved without the others. ``exceptions`` are written ``importing module -> imported module``; an exception that
    closes no cycle is refused.
    """

    type_name = "no_cycles"

    exceptions = fields.ListField(subfield=fields.StringField(), default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        imports = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
        needless = []
        for line in cast("list[str]", self.exceptions):
            importer, _, imported = line.partition(" -> ")
            if imported in imports.get(importer, ()) and chain_of_imports(imports, imported, importer):
                imports[importer] = imports[importer] - {imported}
            else:
                needless.append(line)
        found = cycles(imports)
        where = {
            (importer, imported): lines(graph, importer, imported)
            for cycle in found
            for importer, imported in pairwise(cycle)
        }
        metadata = {"cycles": found, "where": where, "needless": needless}
        return ContractCheck(kept=not found and not needless, metadata=metadata)

    def render_broken_contract(self, check: ContractCheck) -> None:
        for cycle in check.metadata["cycles"]:
            output.print_error(f"{len(cycle) - 1} modules import each other:")
            for importer, imported in pairwise(cycle):
                output.print_error(f"    {importer} -> {imported} ({check.metadata['where'][importer, imported]})")
        for line in check.metadata["needless"]:
            output.print_error(f"the exception {line} closes no cycle: remove it")


def cycles(imports: Mapping[str, Set[str]]) -> list[list[str]]:
    """Return cycles of modules that import each other; each module that is in a cycle is in one of them.

    Each cycle is the shortest for one of its modules, and begins and ends with that one.
    """
    found: list[list[str]] = []
    for module in imports:
        if not any(module in cycle for cycle in found) and (cycle := chain_of_imports(imports, module, module)):
            found.append(cycle)
    return found


def chain_of_imports(imports: Mapping[str, Set[str]], first: str, last: str) -> list[str]:
    """Return the shortest chain of imports from module *first* to module *last*; empty if there is none."""
    chains = deque([[first]])
    seen: set[str] = set()
    while chains:
        chain = chains.popleft()
        for imported in sorted(imports.get(chain[-1], ())):
            if imported == last:
                return [*chain, imported]
            if imported not in seen:
                seen.add(imported)
                chains.append([*chain, imported])
    return []


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def lines(graph: ImportGraph, importer: str, imported: str) -> str:
    details: Any = graph.get_import_details(importer=importer, imported=imported)
    return ", ".join(f"l.{detail['line_number']}" for detail in details)
