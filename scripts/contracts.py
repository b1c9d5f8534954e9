"""A contract for import-linter: some packages may use public names only."""

from typing import Any, cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class PublicNamesContract(Contract):
    """
    Forbid the interfaces to import, directly, any module of tenure that is not public. An interface may be missing.

    An interface may import its own modules. ``exceptions`` are written ``importing package -> imported module``.
    """

    type_name = "public_names"

    interfaces = fields.ListField(subfield=fields.StringField())
    public = fields.ListField(subfield=fields.StringField())
    exceptions = fields.ListField(subfield=fields.StringField(), default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        exceptions = [tuple(line.split(" -> ")) for line in cast("list[str]", self.exceptions)]
        illegal = []
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
        return ContractCheck(kept=not illegal, metadata={"illegal": illegal})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported, where in check.metadata["illegal"]:
            output.print_error(f"{importer} is not allowed to import {imported} ({where}): it is not a public name")


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def lines(graph: ImportGraph, importer: str, imported: str) -> str:
    details: Any = graph.get_import_details(importer=importer, imported=imported)
    return ", ".join(f"l.{detail['line_number']}" for detail in details)
