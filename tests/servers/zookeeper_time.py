"""ZooKeeper's class for the time, replaced by one that a test can put forward.

Its sessions end by ``org.apache.zookeeper.common.Time.currentElapsedTime``. This one adds as many milliseconds as a
file has bytes, which is changed in one step. (libfaketime changes Java's sleeps, too, and now and then one lasts for as
long as the clock was turned.) The class is assembled here, as a server needs no compiler. In Java, it is::

    package org.apache.zookeeper.common;

    public class Time {
        public static long currentElapsedTime() {
            return System.nanoTime() / 1_000_000L + new java.io.File("ahead").length();
        }
        public static long currentWallTime() {
            return System.currentTimeMillis();
        }
        public static java.util.Date elapsedTimeToDate(long elapsedTime) {
            return new java.util.Date(currentWallTime() + elapsedTime - currentElapsedTime());
        }
    }
"""

from __future__ import annotations

import struct
from pathlib import Path

AHEAD = "ahead"
"""The name of the file, in the folder in which the server runs."""
NAME = "org/apache/zookeeper/common/Time"
JAVA_8 = 52
PUBLIC, STATIC, SUPER = 0x1, 0x8, 0x20

LLOAD_0, LDC, LDC2_W, DUP, LADD, LSUB, LDIV = 0x1E, 0x12, 0x14, 0x59, 0x61, 0x65, 0x6D
LRETURN, ARETURN, INVOKEVIRTUAL, INVOKESPECIAL, INVOKESTATIC, NEW = 0xAD, 0xB0, 0xB6, 0xB7, 0xB8, 0xBB


class _Constants:
    """The constants of a class, numbered from 1; a long takes two numbers."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._next = 1

    def add(self, constant: bytes, *, takes: int = 1) -> int:
        if constant not in self._numbers:
            self._numbers[constant] = self._next
            self._next += takes
        return self._numbers[constant]

    def text(self, text: str) -> int:
        return self.add(struct.pack(">BH", 1, len(text)) + text.encode("ascii"))

    def long(self, value: int) -> int:
        return self.add(struct.pack(">Bq", 5, value), takes=2)

    def kind(self, name: str) -> int:
        return self.add(struct.pack(">BH", 7, self.text(name)))

    def string(self, text: str) -> int:
        return self.add(struct.pack(">BH", 8, self.text(text)))

    def method(self, kind: str, name: str, signature: str) -> int:
        described = self.add(struct.pack(">BHH", 12, self.text(name), self.text(signature)))
        return self.add(struct.pack(">BHH", 10, self.kind(kind), described))

    def written(self) -> bytes:
        return struct.pack(">H", self._next) + b"".join(self._numbers)


def write_class(folder: Path) -> None:
    """Write the class below *folder*, which is to come first in the class path."""
    path = folder / f"{NAME}.class"
    path.parent.mkdir(parents=True)
    path.write_bytes(_assembled())


def _assembled() -> bytes:
    known = _Constants()

    def call(how: int, kind: str, name: str, signature: str) -> bytes:
        return struct.pack(">BH", how, known.method(kind, name, signature))

    def new(kind: str) -> bytes:
        return struct.pack(">BHB", NEW, known.kind(kind), DUP)

    elapsed = (
        call(INVOKESTATIC, "java/lang/System", "nanoTime", "()J")
        + struct.pack(">BHB", LDC2_W, known.long(1_000_000), LDIV)
        + new("java/io/File")
        + struct.pack(">BB", LDC, known.string(AHEAD))
        + call(INVOKESPECIAL, "java/io/File", "<init>", "(Ljava/lang/String;)V")
        + call(INVOKEVIRTUAL, "java/io/File", "length", "()J")
        + bytes([LADD, LRETURN])
    )
    wall = call(INVOKESTATIC, "java/lang/System", "currentTimeMillis", "()J") + bytes([LRETURN])
    date = (
        new("java/util/Date")
        + call(INVOKESTATIC, NAME, "currentWallTime", "()J")
        + bytes([LLOAD_0, LADD])
        + call(INVOKESTATIC, NAME, "currentElapsedTime", "()J")
        + bytes([LSUB])
        + call(INVOKESPECIAL, "java/util/Date", "<init>", "(J)V")
        + bytes([ARETURN])
    )
    methods = [
        ("currentElapsedTime", "()J", elapsed),
        ("currentWallTime", "()J", wall),
        ("elapsedTimeToDate", "(J)Ljava/util/Date;", date),
    ]
    code_of = known.text("Code")
    written = b""
    for name, signature, code in methods:
        attribute = struct.pack(">HHI", 8, 2, len(code)) + code + struct.pack(">HH", 0, 0)  # 8 on the stack at most
        written += struct.pack(">HHHH", PUBLIC | STATIC, known.text(name), known.text(signature), 1)
        written += struct.pack(">HI", code_of, len(attribute)) + attribute
    itself = struct.pack(">HHHHH", PUBLIC | SUPER, known.kind(NAME), known.kind("java/lang/Object"), 0, 0)
    head = struct.pack(">IHH", 0xCAFEBABE, 0, JAVA_8)
    return head + known.written() + itself + struct.pack(">H", len(methods)) + written + struct.pack(">H", 0)
