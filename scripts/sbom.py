"""
The software bill of materials of a wheel, in CycloneDX: the wheel, and the packages that its extras bring.

The wheel holds and needs no other package, so all of these are optional; each names the extras that bring it, its
licence, and the version that the tests ran with. The same wheel and time give the same bytes.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.extras import ENVIRONMENTS, FOR_USERS, PROJECT, brought, closure, required
from scripts.licences import Package, judged

BROUGHT_BY = "cdx:python:package:required-extra"  # as CycloneDX's own tool for Python names it


def bill_of_materials(wheel: Path, made: datetime) -> str:
    """Return the bill of *wheel* as JSON; *made* is the time of what it was built from.

    Raises:
        ValueError: The version or the licence of a package is unknown or not accepted.
    """
    packages, complaints = judged(brought(FOR_USERS))
    if complaints:
        raise ValueError("; ".join(complaints))
    library = component_of_the_wheel(wheel)
    components = {package.name: component(package) for package in packages}
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, f"{library.purl}#{sha256(wheel)}"),
        metadata=BomMetaData(component=library, timestamp=made),
        components=components.values(),
    )
    named = [text for extra in FOR_USERS for text in required(extra)]
    graph = closure(named, ENVIRONMENTS)
    direct = graph.keys() & {canonicalize_name(Requirement(text).name) for text in named}
    bom.register_dependency(library, [components[name] for name in direct])
    for name, needed in graph.items():
        bom.register_dependency(components[name], [components[one] for one in needed])
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def component_of_the_wheel(wheel: Path) -> Component:
    purl = PackageURL("pypi", name=PROJECT["name"], version=PROJECT["version"])
    return Component(
        name=PROJECT["name"],
        version=PROJECT["version"],
        description=PROJECT["description"],
        bom_ref=str(purl),
        purl=purl,
        licenses=[LicenseFactory().make_from_string(PROJECT["license"])],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256(wheel))],
    )


def component(package: Package) -> Component:
    purl = PackageURL("pypi", name=package.name, version=package.version)
    return Component(
        name=package.name,
        version=package.version,
        scope=ComponentScope.OPTIONAL,
        bom_ref=str(purl),
        purl=purl,
        licenses=[LicenseFactory().make_from_string(package.licence)],
        properties=[Property(name=BROUGHT_BY, value=extra) for extra in sorted(package.extras)],
    )


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
