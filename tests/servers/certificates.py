"""Certificates for TLS tests, made by openssl when they are needed: none is in the repository."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path

from tests.servers.process import run_folder

_CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    """A certificate authority. A client that trusts a second one refuses the certificates of the first."""

    def __init__(self, name: str = "tenure test authority") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="authority-", dir=run_folder()))
        self._folder.chmod(0o755)
        self.certificate = self._folder / "ca.pem"
        self._key = self._folder / "ca.key"
        made = ["-x509", "-days", "2", "-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.certificate)]
        usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        _openssl("req", *_CURVE, *made, *usage)

    def issue(
        self, folder: Path, host: str = "127.0.0.1", usage: str = "serverAuth", *, days: int = 2
    ) -> tuple[Path, Path]:
        """Issue a certificate for a server at *host*, and return it with its key, as files in *folder*.

        For a client, *usage* is ``clientAuth``, and *host* its common name; empty: it has none. It ends after *days*,
        which may be negative.
        """
        certificate, key, request = folder / "server.pem", folder / "server.key", folder / "server.csr"
        subject = f"/CN={host}" if host else "/O=tenure tests"
        _openssl("req", *_CURVE, "-subj", subject, "-keyout", str(key), "-out", str(request))
        kind = "IP" if host.replace(".", "").isdigit() else "DNS"
        extensions = folder / "server.ext"
        alternative = f"subjectAltName={kind}:{host}\n" if "serverAuth" in usage else ""
        extensions.write_text(f"{alternative}extendedKeyUsage={usage}\n")
        by = ["-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial"]
        to = ["-days", str(days), "-extfile", str(extensions), "-out", str(certificate)]
        _openssl("x509", "-req", "-in", str(request), *by, *to)
        return certificate, key

    def context(self) -> ssl.SSLContext:
        """Return a client's context that trusts this authority only, and doesn't check host names."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.check_hostname = False
        return context


class CertificateFiles:
    """The files of a client, replaced as Kubernetes replaces those of a secret: by a link to another folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._issued = 0
        self.names = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key")}
        for name, path in self.names.items():
            path.symlink_to(Path("..data", f"{name}.pem"))

    def renew(self, usage: str = "clientAuth", *, days: int = 2) -> tuple[Authority, tuple[Path, Path]]:
        """Replace all by those of a new authority; return it, and a certificate of it for a server, with its key."""
        self._issued += 1
        authority = Authority(f"authority {self._issued}")
        made = self._folder / f"..{self._issued}"
        for folder in (made, made / "client", made / "server"):
            folder.mkdir()
        cert, key = authority.issue(made / "client", "127.0.0.1", usage, days=days)
        for name, path in (("ca", authority.certificate), ("cert", cert), ("key", key)):
            shutil.copy(path, made / f"{name}.pem")
        (self._folder / "..new").symlink_to(made.name)
        (self._folder / "..new").rename(self._folder / "..data")
        return authority, authority.issue(made / "server")


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {arguments[0]} failed:\n{done.stderr[-2_000:]}")
