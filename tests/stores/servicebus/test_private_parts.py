"""What is used of ``azure-servicebus`` beyond its public names is listed, is there, and is refused where it isn't."""

from __future__ import annotations

import ast
import importlib
import math
import re
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure._backends import servicebus
from tenure._backends.servicebus import amqp, library
from tenure.errors import ConfigError
from tests.servers import ServiceBus
from tests.stores.servicebus.opened import inside, link_of, opened, sent

SOURCE = Path(servicebus.__file__).parent
LISTED = {
    *(call.name.rpartition(".")[2] for call in library.CALLS),
    *library.OWNER,
    *library.CLIENT,
    *library.CONNECTION,
    *library.SESSION,
    *library.LINK,
    *library.LOGIN,
    "_link",  # of a client that has one
}
ADVICE = r"; tenure was tested with .*: run: pip install 'azure-servicebus~=7"


def test_the_installed_version_fits() -> None:
    library.check_library()


# --- all of it is listed ---


def test_no_other_module_names_private_parts() -> None:
    for file in SOURCE.parents[1].rglob("*.py"):
        if file != SOURCE / "library.py":
            assert not re.findall(r"azure\.servicebus(?:\.\w+)*\._|_pyamqp", file.read_text()), file


def unlisted(source: str) -> set[str]:
    """Return the private attributes, of anything but ``self``, that a source uses and that aren't listed."""
    found = {
        one.attr
        for one in ast.walk(ast.parse(source))
        if isinstance(one, ast.Attribute)
        and one.attr.startswith("_")
        and not one.attr.startswith("__")
        and not (isinstance(one.value, ast.Name) and one.value.id == "self")
    }
    return found - LISTED


def test_all_private_names_are_listed() -> None:
    assert not unlisted((SOURCE / "library.py").read_text())


@pytest.mark.parametrize(
    "bug",
    [
        "self._link._received_payload",
        "link._received_payload = handle",
        "self._link = session.links[0]._received_payload",
    ],
)
def test_a_planted_private_name_is_found(bug: str) -> None:
    assert unlisted(bug) == {"_received_payload"}


# --- a version that lacks any of it is refused ---


def place_of(call: library.Call) -> tuple[Any, str]:
    """Return what a function belongs to, and its name there."""
    owner: Any = importlib.import_module(call.module)
    *path, name = call.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


@pytest.mark.parametrize("call", library.CALLS, ids=lambda call: call.name)
def test_a_function_that_is_gone_or_differs_is_refused(call: library.Call, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = place_of(call)
    monkeypatch.setattr(owner, name, lambda one, *, other: None)
    with pytest.raises(ConfigError, match=f"its {call.name} takes other arguments .*{ADVICE}"):
        library.check_library()
    monkeypatch.setattr(library, "CALLS", [call._replace(name=f"{call.name}_gone")])
    with pytest.raises(ConfigError, match=f"it has no {call.name}_gone{ADVICE}"):
        library.check_library()


@pytest.mark.parametrize("kind", library.CONSTANTS, ids=lambda kind: kind.__name__)
def test_a_constant_that_is_gone_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "CONSTANTS", {kind: (*library.CONSTANTS[kind], "GONE")})
    with pytest.raises(ConfigError, match=f"it has no {kind.__name__}.GONE"):
        library.check_library()


@pytest.mark.parametrize("name", library.LINK)
def test_a_link_that_lacks_an_attribute_is_refused(name: str) -> None:
    link = SimpleNamespace(**dict.fromkeys(library.LINK))
    library.Link(link)
    delattr(link, name)
    with pytest.raises(ConfigError, match=f"its SimpleNamespace has no {name}"):
        library.Link(link)


@pytest.mark.parametrize(
    "loss",
    [
        "from azure.servicebus._pyamqp import constants; del constants.CbsState",
        "import sys; sys.modules['azure.servicebus._pyamqp.error'] = None",
    ],
)
def test_a_name_that_can_not_be_imported_is_a_config_error(loss: str) -> None:
    program = f"import azure.servicebus.aio, tenure; {loss}; tenure.connect('servicebus://127.0.0.1?emulator=yes')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tenure.errors.ConfigError: azure-servicebus ")
    assert "run: pip install 'azure-servicebus~=" in last


# --- objects have what is listed for them ---


async def test_objects_of_the_library_have_what_is_listed(server: ServiceBus, queue: str) -> None:
    async with opened(server.url) as broker:
        await sent(broker, queue, "a")
        await broker.receive(queue, 1, 30)
        wire = link_of(broker, queue)._wire
        for one, names in (
            (wire._owner, library.OWNER),
            (wire._client, library.CLIENT),
            (wire._connection, library.CONNECTION),
            (wire._session, library.SESSION),
            (wire._login, library.LOGIN),
            (wire._client._link, library.LINK),
        ):
            assert not [name for name in names if not hasattr(one, name)]
        assert isinstance(wire._session.channel, int)
        assert wire.link is not None
        assert wire.link.is_attached()
        left = wire.login_ends_in
        assert left is not None
        assert 60 < left < 86_400
        before = wire.last_frame_at
        await sent(broker, queue, "b")
        await inside(broker, link_of(broker, queue).ask(1))
        await inside(broker, link_of(broker, queue).until_more(5.0))
        assert wire.last_frame_at > before


# --- what is written here can be read ---

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
    | st.binary(max_size=300)
    | st.uuids()
)


@given(st.recursive(SCALARS, lambda parts: st.lists(parts) | st.dictionaries(st.text(max_size=5), parts), max_leaves=8))
def test_what_is_encoded_is_read_as_it_was(value: Any) -> None:
    assert amqp.value_of(amqp.encoded(value)) == value


@given(SCALARS)
def test_another_implementation_reads_the_same(value: Any) -> None:
    data = pytest.importorskip("proton").Data()
    data.decode(amqp.encoded([value, amqp.Value(amqp.symbol("name")), amqp.Value(amqp.uint(7))]))
    data.rewind()
    data.next()
    found = data.get_object()
    expected = memoryview(value) if isinstance(value, bytes) else value
    assert [found[0], str(found[1]), int(found[2])] == [expected, "name", 7]


@pytest.mark.parametrize("count", [0, 1, 300])
def test_arrays_are_read(count: int) -> None:
    tokens = [uuid.uuid4() for _ in range(count)]
    assert amqp.value_of(amqp.array([amqp.encoded(one) for one in tokens])) == tokens


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, object(), math.inf.as_integer_ratio, "\ud800"])
def test_what_has_no_form_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        amqp.encoded(value)
