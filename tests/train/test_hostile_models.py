"""Model folders, tokenizers and chat templates that somebody made: one clear `BadInput`, in time; nothing is run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from terrazzo.checkpoint.hub_folder import read_model_config
from terrazzo.config import config_from_dict, load_config
from terrazzo.errors import BadInput
from terrazzo.planner.model.loading import model_shape
from terrazzo.train.data import rendering
from terrazzo.train.data.chat import chat_fingerprint, load_chat
from terrazzo.train.data.records import Document
from terrazzo.train.data.tokenizer import load_tokenizer
from terrazzo.train.model.causal_lm import build_model
from terrazzo.train.model.huggingface import build_causal_lm
from terrazzo.train.preflight import check
from tests.helpers import programs
from tests.helpers.chat import save_tokenizer, turns
from tests.helpers.cover import mostly_long

pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
KERNEL = "somebody/kernel"


def replaced_by_what_has_no_end(file: Path, how: str) -> None:
    """In place of a file a pipe, a link to a device, or more than can be."""
    file.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(file)
    elif how == "device":
        file.symlink_to("/dev/zero")
    elif how == "link":
        file.symlink_to("/etc/passwd")
    else:
        file.touch()
        os.truncate(file, 1 << 36)


ENDLESS = ("pipe", "device", "link", "huge")


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": KERNEL}, {"attn_implementation": {"": KERNEL}}, {"attn_implementation": [KERNEL]},
        {"attn_implementation": {"text_config": {"a": KERNEL}}}, {"experts_implementation": KERNEL},
        {"text_config": {"attn_implementation": KERNEL}}, {"rope_scaling": [{"attn_implementation": KERNEL}]},
        {"attn_implementation": f"flash_attention_2|{KERNEL}"}, {"text_config": {"auto_map": {"A": "evil.A"}}},
        {"hidden_size": "wide"}, {"hidden_size": None}, {"hidden_size": -1}, {"num_hidden_layers": 10**9},
        {"num_hidden_layers": [2]}, {"vocab_size": 1e400}, {"hidden_act": "no such thing"}, {"hidden_act": {"a": 1}},
        {"num_attention_heads": 0}, {"model_type": ["llama"]}, {"model_type": None}, {"dtype": "no dtype"},
    ],
    ids=str,
)  # fmt: skip
def test_configs_that_name_code_or_make_no_model(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        build_model({**LLAMA, **changes})
    if KERNEL in str(changes):
        assert "fetched and run" in str(caught.value)


def test_a_kernel_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "attn_implementation": KERNEL}))
    config = {"model": {"kind": "huggingface", "path": str(tmp_path)}, "log": {"folder": str(tmp_path / "run")}}
    with pytest.raises(BadInput, match="attn_implementation is 'somebody/kernel'"):
        check(config_from_dict(config), 1)
    with pytest.raises(BadInput, match="attn_implementation is 'somebody/kernel'"):
        model_shape({**LLAMA, "model_type": "cohere", "attn_implementation": KERNEL})
    for known in ("eager", "sdpa"):
        found = build_causal_lm({**LLAMA, "attn_implementation": known}, __import__("torch").device("meta"))
        assert found.config._attn_implementation == known


@pytest.mark.parametrize("how", ENDLESS)
def test_configs_without_end(tmp_path: Path, how: str) -> None:
    replaced_by_what_has_no_end(tmp_path / "config.json", how)
    with pytest.raises(BadInput, match=r"config\.json"):
        read_model_config(tmp_path)
    if how != "link":
        (tmp_path / "a.yaml").symlink_to("config.json")
        with pytest.raises(BadInput, match=r"a\.yaml"):
            load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "1", '"a"', "\xff", '{"a": 1', "9" * 10_000])
def test_configs_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(BadInput, match=r"config\.json"):
        read_model_config(tmp_path)


# -- tokenizers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def copied(source: Path, to: Path) -> Path:
    to.mkdir()
    for file in source.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize("how", ENDLESS)
def test_tokenizers_with_files_without_end(tmp_path: Path, tokenizer: Path, how: str) -> None:
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"]
    names += ["merges.txt", "tokenizer.model", "spiece.model", "a.tiktoken", "chat_template.jinja", "config.json"]
    for name in names:
        folder = copied(tokenizer, tmp_path / name)
        replaced_by_what_has_no_end(folder / name, how)
        for work in (
            lambda: load_tokenizer(str(folder)),  # noqa: B023 - called at once
            lambda: chat_fingerprint(str(folder), None, "all"),  # noqa: B023
            lambda: load_chat(load_tokenizer("bytes"), str(folder), None, "all"),  # noqa: B023
        ):
            with pytest.raises(BadInput, match=name):
                work()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("tokenizer.json", text) for text in ("", "[]", "{}", "1", "[" * 100_000, '{"model": {"type": "BPE"}}')],
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}'),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": [["b", "c"]]}}'),
        *[("tokenizer_config.json", text) for text in ("[]", "1", "{", "[" * 100_000, '{"eos_token": "no token"}')],
        ("tokenizer_config.json", '{"eos_token": {"content": ["a"]}, "tokenizer_class": 7}'),
    ],
)
def test_tokenizers_that_are_none(tmp_path: Path, tokenizer: Path, name: str, text: str) -> None:
    folder = copied(tokenizer, tmp_path / "t")
    (folder / name).write_text(text)
    before = time.process_time()
    refused = []
    try:
        load_tokenizer(str(folder))
        load_chat(load_tokenizer("bytes"), str(folder), None, "all")
    except BadInput as error:
        refused.append(str(error))
    assert "tokenizer_class" in text or [str(folder) in said for said in refused] == [True]
    assert time.process_time() - before < 20


def test_data_beside_a_tokenizer_are_no_concern_of_it(tmp_path: Path, tokenizer: Path) -> None:
    """Not what nothing reads, whatever it is called; of a file's own folder only what states the end is read."""
    folder = copied(tokenizer, tmp_path / "corpus")
    for name in ("tokens.bin", "tokens.npy", "vocab.bin", "train_tokens.idx"):
        replaced_by_what_has_no_end(folder / name, "huge")
    load_chat(load_tokenizer(str(folder)), str(folder), None, "all")
    load_chat(load_tokenizer("bytes"), str(folder / "tokenizer.json"), None, "all")
    for name in ("vocab.json", "other.model", "config.json", "word_tokens.json"):
        replaced_by_what_has_no_end(folder / name, "huge")
    given = load_tokenizer(str(folder / "tokenizer.json"))
    assert given.fingerprint == load_tokenizer(str(tokenizer)).fingerprint
    for how in ENDLESS:
        replaced_by_what_has_no_end(folder / "tokenizer_config.json", how)
        with pytest.raises(BadInput, match=r"tokenizer_config\.json"):
            load_tokenizer(str(folder / "tokenizer.json"))


def in_the_cache_of_the_hub(source: Path, cache: Path) -> Path:
    """A snapshot of `source`, all of it links to blobs."""
    snapshot, blobs = cache / "snapshots" / "0a1b", cache / "blobs"
    for file in (file for file in source.rglob("*") if file.is_file()):
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        blobs.mkdir(exist_ok=True)
        (blobs / link.name).write_bytes(file.read_bytes())
        link.symlink_to(os.path.relpath(blobs / link.name, link.parent))
    return snapshot


def test_the_cache_of_the_hub_with_templates_in_a_subfolder(tmp_path: Path, tokenizer: Path) -> None:
    folder = copied(tokenizer, tmp_path / "t")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    snapshot = in_the_cache_of_the_hub(folder, tmp_path / "cache")
    assert (snapshot / "additional_chat_templates" / "rag.jinja").is_symlink()
    load_chat(load_tokenizer(str(snapshot)), str(snapshot), None, "all")
    assert chat_fingerprint(str(snapshot), None, "all") == chat_fingerprint(str(folder), None, "all")
    (snapshot / "additional_chat_templates" / "secret.jinja").symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match=r"secret\.jinja"):
        load_tokenizer(str(snapshot))


def test_no_code_that_comes_with_a_tokenizer_is_run(tmp_path: Path, tokenizer: Path) -> None:
    folder = copied(tokenizer, tmp_path / "t")
    mark = tmp_path / "was run"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    settings |= {"trust_remote_code": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for work in (
        lambda: load_tokenizer(str(folder)),
        lambda: load_chat(load_tokenizer("bytes"), str(folder), None, "all"),
    ):
        with contextlib.suppress(BadInput):
            work()
    assert not mark.exists()


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "a.tiktoken"])
def test_older_vocabularies_that_are_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(os.urandom(1000))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    with pytest.raises(BadInput, match=r"cannot make a tokenizer|has no token"):
        load_tokenizer(str(tmp_path))


# -- chat templates ------------------------------------------------------------------------------------------------

MANY = "range(99999)"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (f"{{% for i in {MANY} %}}{{% for j in {MANY} %}}{{% endfor %}}{{% endfor %}}", "was stopped"),
        ("{% set x = 9 ** (9 ** 9) %}{{ x }}", "was stopped"),
        ("{{ 'a' * 10 ** 10 }}", "memory|MemoryError"),
        ("{{ 'a' * 10 ** 8 }}", "has 100,000,000 characters|was stopped"),
        ("{{ '%99999999999d' % 1 }}", "Error|memory"),
        ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "RecursionError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
        ("{{ messages[0].__class__.__mro__ }}", "SecurityError"),
        ("{{ ''.format_map({}).__class__ }}", "SecurityError|leaves out"),
        ("{{ '{0.__class__}'.format(messages) }}", "SecurityError|leaves out"),
        ("{{ self._TemplateReference__context.environment }}", "SecurityError|UndefinedError"),
        ("{{ messages[0].update({'role': 'x'}) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "Error"),
        ("{{ (" * 20_000, "Error|error in line|exit code"),
    ],
)
def test_templates_that_do_not_end_or_reach_out(
    tmp_path: Path, tokenizer: Path, template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.jinja").write_text(template)
    chat = load_chat(load_tokenizer(str(tokenizer)), str(tokenizer), tmp_path / "own.jinja", "all")
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.3 if said == "was stopped" else 1.0)
    with pytest.raises(BadInput, match=f"(?s)({said})"):
        chat.render(Document("a:1", "", messages=turns("a", "b")))


@pytest.mark.parametrize("how", mostly_long(["ignored", "blocked"], "blocked"))
def test_a_template_that_does_not_end_is_stopped_whatever_the_parent_ignores(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are passed on to the processes that it starts."""
    endless = {"messages": turns("a", "b"), "chat_template": f"{{% for i in {MANY} %}}" * 3 + "{% endfor %}" * 3}
    rendering._end()
    monkeypatch.setattr(rendering, "subprocess", subprocess)
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN if how == "ignored" else signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF] if how == "blocked" else [])
    ends = threading.Timer(10.0, rendering._end)
    try:
        rendering.render({"messages": turns("a", "b"), "chat_template": "ready"})  # started, which takes its time
        monkeypatch.setattr(rendering, "MAX_SECONDS", 0.2)
        ends.start()
        with pytest.raises(rendering.Failed, match="processor time was over"):
            rendering.render(endless)
    finally:
        ends.cancel()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGPROF, before)
        rendering._end()


def once_it_renders(act: Callable[[], object]) -> threading.Thread:
    """A thread that calls `act` when the process that renders, which is ready, has computed for a tenth of a second."""
    assert rendering._process is not None
    status = Path(f"/proc/{rendering._process.pid}/stat")

    def ticks() -> int:
        return sum(map(int, status.read_text().rpartition(")")[2].split()[11:13]))  # of the user and of the system

    def watch(until: int) -> None:
        while ticks() < until:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch, args=(ticks() + os.sysconf("SC_CLK_TCK") // 10,), daemon=True)
    thread.start()
    return thread


def test_a_rendering_whose_process_another_thread_ends_is_an_error_of_its_conversation() -> None:
    endless = {"messages": turns("a", "b"), "chat_template": f"{{% for i in {MANY} %}}" * 3 + "{% endfor %}" * 3}
    rendering.render({"messages": turns("a", "b"), "chat_template": "ready"})
    ends = once_it_renders(rendering._end)
    with pytest.raises(rendering.Failed, match="the process that renders was killed"):
        rendering.render(endless)
    ends.join()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_folder_in_the_place_of_a_chat_template_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(BadInput, match=f"{name}' is a folder: name a file"):
        chat_fingerprint(str(tmp_path), None, "all")


def test_one_interrupt_ends_a_rendering(tokenizer: Path) -> None:
    """Ctrl-C goes to all processes of a terminal, so to the one that renders."""
    endless = {"messages": turns("a", "b"), "chat_template": f"{{% for i in {MANY} %}}" * 3 + "{% endfor %}" * 3}
    rendering.render({"messages": turns("a", "b"), "chat_template": "ready"})
    process = rendering._process
    assert process is not None
    interrupts = once_it_renders(lambda: process.send_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        rendering.render(endless)
    interrupts.join()
    assert rendering.render({"messages": turns("a", "b"), "chat_template": "{{ 1 + 1 }}"})[0] == "2"


def test_a_rendering_ends_with_the_process_that_asked() -> None:
    program = """
import os, signal, threading
from terrazzo.train.data import rendering
rendering.render({"messages": [{"role": "user", "content": "a"}], "chat_template": "ready"})
print(rendering._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = programs.run("-c", program)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while Path(f"/proc/{done.stdout.strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
