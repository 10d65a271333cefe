"""What makes a manifest trustworthy: its SHA-256, and with a key who wrote it.

Every byte of a checkpoint is under a digest in the manifest, and the manifest is under the seal. With a key in
TERRAZZO_CHECKPOINT_KEY_FILE the seal also holds an HMAC, and a checkpoint without a true one is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from pathlib import Path

from terrazzo.checkpoint.format.manifest import MANIFEST, SEAL
from terrazzo.errors import BadInput, Damaged

__all__ = ["KEY_FILE", "check_seal", "seal_of"]

KEY_FILE = "TERRAZZO_CHECKPOINT_KEY_FILE"
_HMAC = "hmac-sha256:"
_HMAC_LINE = re.compile(f"# {_HMAC}[0-9a-f]{{64}}")


def seal_of(manifest: bytes) -> bytes:
    """The contents of the seal: a line for `sha256sum --check`, and one for the key's holder where there is a key."""
    lines = [f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}"]
    if (key := _key()) is not None:
        lines.append(f"# {_HMAC}{_signature(key, manifest)}")
    return "".join(f"{line}\n" for line in lines).encode()


def check_seal(manifest: bytes, seal: bytes, where: str) -> None:
    """Raises `Damaged` when `seal` is not of `manifest`, or not of the holder of this run's key."""
    lines = seal.decode(errors="replace").split("\n")
    if lines[0] != f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}" or lines[-1]:
        raise Damaged(
            f"'{where}/{MANIFEST}' does not have the digest that {SEAL} states: one of them has been changed."
        )
    key = _key()
    if key is not None and not hmac.compare_digest(
        "\n".join(lines[1:]).encode(), f"# {_HMAC}{_signature(key, manifest)}\n".encode()
    ):
        raise Damaged(f"'{where}' was not sealed with the key in {KEY_FILE}: it comes from elsewhere, or was changed.")
    if key is None and lines[1:] != [""] and not (len(lines) == 3 and _HMAC_LINE.fullmatch(lines[1])):
        raise Damaged(f"'{where}/{SEAL}' holds something else: it has been changed.")


def _signature(key: bytes, manifest: bytes) -> str:
    return hmac.new(key, manifest, hashlib.sha256).hexdigest()


def _key() -> bytes | None:
    path = os.environ.get(KEY_FILE)
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise BadInput(f"The key file '{path}' of {KEY_FILE} cannot be read: {error.strerror}.") from None
    if len(key) < 16:
        raise BadInput(
            f"The key in '{path}' has {len(key)} bytes; give 16 or more, such as from 'openssl rand -hex 32'."
        )
    return key
