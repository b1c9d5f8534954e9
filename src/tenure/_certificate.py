"""When a certificate ends: the one date of X.509 that Python's ``ssl`` tells of the other side's certificate only."""

from __future__ import annotations

import re
from binascii import a2b_base64
from datetime import UTC, datetime
from typing import NamedTuple

from tenure._foreign import Unreadable

CERTIFICATE_MAX = 262_144
"""Bytes of the longest certificate, as PEM, whose date is read."""

_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_REST = rb"(\d\d)" * 5 + rb"Z"
_FORMS = {_UTC_TIME: re.compile(rb"(\d\d)" + _REST), _GENERALIZED_TIME: re.compile(rb"(\d{4})" + _REST)}


class _Value(NamedTuple):
    """A value of DER: its tag and its content, and where the next one begins."""

    tag: int
    content: bytes
    end: int


def ends_at(pem: bytes) -> float:
    """Return the Unix time at which the first certificate in *pem* ends: of a chain, that is the one that is shown.

    Raises:
        Unreadable: There is none, or it has another form than X.509 defines.
    """
    begin = pem.find(_BEGIN)
    end = pem.find(_END, begin)
    if begin < 0 or end < 0 or end - begin > CERTIFICATE_MAX:
        raise Unreadable("it has no certificate as PEM")
    try:
        der = a2b_base64(pem[begin + len(_BEGIN) : end])
    except ValueError:
        raise Unreadable("its certificate is no base64") from None
    fields = _value(_value(der, 0, _SEQUENCE).content, 0, _SEQUENCE).content
    first = _value(fields, 0)
    at = first.end if first.tag == _VERSION else 0
    for _ in ("serial number", "signature algorithm", "issuer"):
        at = _value(fields, at).end
    validity = _value(fields, at, _SEQUENCE).content
    return _time(_value(validity, _value(validity, 0).end))


def _value(der: bytes, at: int, tag: int | None = None) -> _Value:
    """Return the value that begins at *at*; it must have this *tag*, if one is given."""
    head = der[at : at + 2]
    if len(head) < 2 or (tag is not None and head[0] != tag):
        raise Unreadable("its certificate is no X.509 certificate")
    size, begin = head[1], at + 2
    if size >= 0x80:  # then it is how many bytes the length has
        begin += size - 0x80
        size = int.from_bytes(der[at + 2 : begin][:4], "big") if size - 0x80 <= 4 else len(der)
    content = der[begin : begin + size]
    if len(content) < size:
        raise Unreadable("its certificate is cut off")
    return _Value(head[0], content, begin + size)


def _time(value: _Value) -> float:
    form = _FORMS.get(value.tag)
    found = form.fullmatch(value.content) if form is not None else None
    if found is None:
        raise Unreadable("its certificate has no date of its end")
    year, month, day, hour, minute, second = map(int, found.groups())
    if value.tag == _UTC_TIME:
        year += 1900 if year >= 50 else 2000  # as RFC 5280 reads two digits
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        raise Unreadable("its certificate has an end that is no date") from None
