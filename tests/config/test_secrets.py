"""Passwords in URLs: what is hidden, and what is none and stays."""

from __future__ import annotations

import pytest

from terrazzo.config import without_passwords


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("s3://key:secret@host/path", "s3://***@host/path"),
        ("https://token@host", "https://***@host"),
        ("u://me:p@ss@host/x", "u://***@host/x"),
        ("u://me:p@s@s@host:21/x", "u://***@host:21/x"),
        ("s3://KEY:se/cr/et@bucket/x", "s3://***@bucket/x"),
        ("s3://KEY:/se+cr=et@bucket/x", "s3://***@bucket/x"),
        ("u://me:p@ss!/w@rd@host/x", "u://***@host/x"),
        ("u://me:it's@host/x", "u://***@host/x"),
        ("u://me:a?b#c@host", "u://***@host"),
        ("u://me:secret@[::1]:21/x", "u://***@[::1]:21/x"),
        ("cache::s3://key:secret@host/x::file://a", "cache::s3://***@host/x::file://a"),
        ("s3://a/b,s3://key:secret@host/x", "s3://a/b,s3://***@host/x"),
        ("cannot save in 's3://k:s/t@host/x': 404.", "cannot save in 's3://***@host/x': 404."),
        ("'s3://k:s@host/x','me@example.com'", "'s3://***@host/x','me@example.com'"),
        ('{"a": "s3://k:s@host"}, "b@c"', '{"a": "s3://***@host"}, "b@c"'),
        ("(s3://k:s@host) s3://k:s@host, s3://k:s@host: gone", "(s3://***@host) s3://***@host, s3://***@host: gone"),
    ],
)
def test_user_and_password_are_hidden(given: str, shown: str) -> None:
    assert without_passwords(given) == shown
    assert without_passwords(shown) == shown
    assert without_passwords({"a": [given, 1, None]}) == {"a": [shown, 1, None]}


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/dir@v1/step-3",
        "https://host/users/me@example.com",
        "https://host:8080/users/me@example.com",
        "http://[::1]:8080/a@b",
        "write to me@example.com, or see s3://bucket: me@example.com",
        "'s3://bucket/x', said me@example.com",
        "file:///home/me@work/x",
        "memory://a:b",
        "no URL: a:b@c",
    ],
)
def test_what_is_no_password_stays(text: str) -> None:
    assert without_passwords(text) == text


@pytest.mark.parametrize("rest", ["/users/me@example.com", "/dir@v1/x", ":21/a@b"])
def test_a_path_behind_a_password_stays(rest: str) -> None:
    assert without_passwords(f"sftp://me:secret@host{rest}") == f"sftp://***@host{rest}"
