"""Which hosts may be asked without TLS as an emulator of Azure."""

from __future__ import annotations

import pytest

from tenure._azure_emulators import may_be_emulator


@pytest.mark.parametrize(
    ("host", "with_known_key", "with_own_key"),
    [
        ("localhost", True, True),
        ("127.0.0.1", True, True),
        ("::1", True, True),
        ("[fd00::7]", True, True),
        ("10.0.0.7", True, True),
        ("192.168.1.7", True, True),
        ("azurite", True, True),
        ("servicebus-emulator", True, True),
        ("Azurite.", True, True),
        ("host.docker.internal", True, True),
        ("azurite.tests.svc.cluster.local", True, True),
        ("emulator.example", True, False),
        ("8.8.8.8", True, False),
        ("::ffff:8.8.8.8", True, False),
        ("134744072", True, False),
        ("0x08080808", True, False),
        ("notlocal.example.local.com", True, False),
        ("namespace.servicebus.windows.net", False, False),
        ("Namespace.ServiceBus.Windows.NET.", False, False),
        ("namespace.servicebus.chinacloudapi.cn", False, False),
        ("namespace.servicebus.usgovcloudapi.net", False, False),
        ("namespace.servicebus.cloudapi.de", False, False),
        ("mine.blob.core.windows.net", False, False),
        ("mine.z01.blob.storage.azure.net", False, False),
        ("notwindows.net", True, False),
        ("", True, False),
    ],
)
def test_which_hosts_may_be_emulators(host: str, with_known_key: bool, with_own_key: bool) -> None:
    assert may_be_emulator(host, has_known_key=True) == with_known_key
    assert may_be_emulator(host, has_known_key=False) == with_own_key
