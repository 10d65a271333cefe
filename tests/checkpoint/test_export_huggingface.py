"""Export to a Hugging Face folder: what `transformers` loads from it is the plain model that was exported."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from terrazzo.checkpoint.exporters.huggingface import export_huggingface
from terrazzo.checkpoint.hub_folder import ModelDescription, describe_folder, tokenizer_files
from terrazzo.checkpoint.source import Source, StateInfo, TensorInfo
from terrazzo.errors import BadInput, Damaged, SaveFailed
from terrazzo.train.data.tokenizer import ByteTokenizer
from terrazzo.train.model.as_llama import byte_tokenizer_files, decoder_as_llama
from terrazzo.train.model.attention_pattern import AttentionPattern
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from terrazzo.untrusted_files import size_inside

transformers = pytest.importorskip("transformers")

DECODER = {
    "vocab_size": 257,
    "dim": 24,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 40,
    "max_sequence_length": 32,
    "rope_theta": 500.0,
    "norm_eps": 1e-3,
}
PLAIN = ModelDescription({"model_type": "llama"})


class MemorySource(Source):
    """The weights and persistent buffers of a module, or any tensors, as weights unless they are called a buffer."""

    format = "memory"

    def __init__(self, tensors: dict[str, Tensor], buffers: tuple[str, ...] = ()) -> None:
        super().__init__("memory")
        self.values: dict[str, Tensor] = {}
        seen: dict[int, str] = {}
        for name, tensor in tensors.items():
            if (first := seen.setdefault(tensor.data_ptr() or id(tensor), name)) != name:
                self.aliases[name] = first
                continue
            kind = "buffer" if name in buffers else "weight"
            self.values[name] = tensor.detach()
            self.tensors[name] = TensorInfo(tuple(tensor.shape), {kind: StateInfo(tensor.dtype, tensor.numel())})

    def _read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return self.values[name].reshape(-1)[start:stop]


def tiny_llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        dtype="float16",  # not what is written
    )
    return randomised(transformers.LlamaForCausalLM(config).float().eval())


def randomised(model: nn.Module) -> nn.Module:
    """Norms begin as ones, which would hide one taken for another."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def loaded(out: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, local_files_only=True
    )
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module, vocab_size: int = 50) -> Tensor:
    output = model(torch.arange(24).view(2, 12) * 7 % vocab_size)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("max_shard_bytes", [10**9, 5000])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_folder_and_computes_the_same(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    model, reference, out = tiny_llama(tied), tmp_path / "reference", tmp_path / "out"
    model.config.save_pretrained(reference)
    model.generation_config.save_pretrained(reference)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "merges.txt", "spiece.model", "notes.txt"):
        (reference / name).write_text(f"this is {name}")

    export_huggingface(
        MemorySource(model.state_dict()), out, describe_folder(reference), max_shard_bytes=max_shard_bytes
    )

    again = loaded(out)
    assert again.dtype == torch.float32
    assert torch.equal(logits(again), logits(model))
    assert {name: (out / name).read_bytes() for name in tokenizer_files(reference)} == tokenizer_files(reference)
    assert len(tokenizer_files(reference)) == 5
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2
    weights = {path.name: safetensors.torch.load_file(path) for path in sorted(out.glob("*.safetensors"))}
    names = [name for tensors in weights.values() for name in tensors]
    assert sorted(names) == sorted(dict(model.named_parameters()))  # a tied one once
    if max_shard_bytes == 5000:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in weights.values()]
        assert len(sizes) > 3 and max(sizes) <= 5000
        assert index["metadata"]["total_size"] == sum(sizes)
        assert index["weight_map"] == {name: file for file, tensors in weights.items() for name in tensors}
    else:
        assert list(weights) == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "reference"]


def test_bfloat16_is_the_rounded_weight(tmp_path: Path) -> None:
    model, out = tiny_llama(tied=False), tmp_path / "out"
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "fp8"}}
    export_huggingface(MemorySource(model.state_dict()), out, ModelDescription(config), dtype=torch.bfloat16)
    again = loaded(out)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    for name, parameter in again.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, model.get_parameter(name).to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("dtypes", "named"),
    [
        ((torch.float16, torch.bfloat16), "float32"),
        ((torch.bfloat16, torch.bfloat16), "bfloat16"),
        ((torch.float8_e4m3fn, torch.bfloat16), "bfloat16"),
        ((torch.float8_e4m3fn, torch.float8_e4m3fn), "float8_e4m3fn"),
    ],
)
def test_the_dtype_that_is_named_holds_all_weights(tmp_path: Path, dtypes: tuple[torch.dtype, ...], named: str) -> None:
    tensors = {f"w{i}": torch.ones(2).to(dtype) for i, dtype in enumerate(dtypes)}
    export_huggingface(MemorySource(tensors), tmp_path / "out", PLAIN)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == named
    export_huggingface(MemorySource(tensors), tmp_path / "cast", PLAIN, dtype=torch.float16)
    cast = safetensors.torch.load_file(tmp_path / "cast" / "model.safetensors")
    assert all(torch.equal(each, torch.ones(2, dtype=torch.float16)) for each in cast.values())


def test_buffers_integers_and_empty_tensors_are_written_as_they_are(tmp_path: Path) -> None:
    tensors = {
        "flag": torch.tensor([True, False, True]),
        "scale": torch.tensor(1.5),
        "mean": torch.randn(5),
        "wide": torch.randn(3, 7, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "strided": torch.randn(6, 5).t(),
        "count": torch.arange(4),
    }
    source = MemorySource(tensors, buffers=("mean", "count", "flag"))
    export_huggingface(source, tmp_path / "out", PLAIN, dtype=torch.bfloat16)
    cast = ("scale", "wide", "none", "strided")
    expected = {name: tensor.bfloat16() if name in cast else tensor for name, tensor in tensors.items()}
    file = tmp_path / "out" / "model.safetensors"
    written = safetensors.torch.load_file(file)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    data = file.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    assert header_bytes % 8 == 0  # all are aligned, for who maps the file into memory
    assert all(header[name]["data_offsets"][0] % written[name].itemsize == 0 for name in written)


def test_a_tie_that_the_config_denies_is_written_out(tmp_path: Path) -> None:
    model = tiny_llama(tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    source = MemorySource(model.state_dict())
    assert source.aliases
    export_huggingface(source, tmp_path / "out", ModelDescription(model.config.to_dict()))
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("tied", [True, False])
def test_the_built_in_decoder_is_a_llama(tmp_path: Path, tied: bool) -> None:
    values = DECODER | {"tie_embeddings": tied}
    model = randomised(Decoder(DecoderConfig(**values)).eval())
    description = decoder_as_llama(values, byte_tokenizer_files(), end_of_document=256)
    export_huggingface(MemorySource(model.state_dict()), tmp_path / "out", description)
    again = loaded(tmp_path / "out")
    assert type(again) is transformers.LlamaForCausalLM
    assert again.config.eos_token_id == again.generation_config.eos_token_id == 256
    torch.testing.assert_close(logits(again, 257), logits(model, 257), rtol=1e-5, atol=1e-5)


def test_the_built_in_decoder_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    values = DECODER | {"tie_embeddings": True}
    model = randomised(Decoder(DecoderConfig(**values, attention=AttentionPattern(5))).eval())
    described = values | {"attention": {"window": 5, "stride": None, "full_every": None}}
    description = decoder_as_llama(described, byte_tokenizer_files(), end_of_document=256)
    export_huggingface(MemorySource(model.state_dict()), tmp_path / "out", description)
    again = loaded(tmp_path / "out")
    assert type(again) is transformers.MistralForCausalLM
    torch.testing.assert_close(logits(again, 257), logits(model, 257), rtol=1e-5, atol=1e-5)
    for key in ("stride", "full_every", "prefix"):
        with pytest.raises(BadInput, match=f"model.attention.{key}, which neither a Llama nor a Mistral has"):
            decoder_as_llama(described | {"attention": {**described["attention"], key: 2}}, {}, None)


def test_the_byte_tokenizer_gives_the_same_ids_and_text(tmp_path: Path) -> None:
    for name, data in byte_tokenizer_files().items():
        (tmp_path / name).write_bytes(data)
    ours, theirs = ByteTokenizer(), transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    every_character = "".join(chr(code) for code in range(0x300)) + "日本 \r\n\t  naïve 👩‍🚀 ﷽ \U0010ffff"
    for text in ("", " ", "a", "<|endoftext|>", "two<|endoftext|> halves", "it's  we'll\n\n", every_character):
        tokens = ours.encode([text])[0].tolist()
        assert theirs(text)["input_ids"] == tokens
        assert theirs.decode(tokens) == text
    assert (theirs.eos_token_id, len(theirs)) == (ours.end_of_document, ours.vocab_size)
    for broken in ([0xFF, 0x41], [0x41, 256, 0x42], [0xE6, 0x97, 0x41, 0xF0, 0x9F]):
        assert theirs.decode(broken, skip_special_tokens=True) == ours.decode(broken)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemorySource({"model.norm.weight": torch.tensor([1.0, 1e6])})
    out = tmp_path / "out"
    with pytest.raises(BadInput, match=r"'model\.norm\.weight' .*1e\+06.*torch\.float16"):
        export_huggingface(source, out, PLAIN, dtype=torch.float16)
    with pytest.raises(BadInput, match=r"as torch\.int8: use torch\.float32"):
        export_huggingface(source, out, PLAIN, dtype=torch.int8)
    with pytest.raises(BadInput, match=r"as torch\.float8_e4m3fn: use torch\.float32"):
        export_huggingface(source, out, PLAIN, dtype=torch.float8_e4m3fn)
    quantized = ModelDescription({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}})
    for codes in (torch.float8_e4m3fn, torch.int32):
        with pytest.raises(BadInput, match=rf"'w' in 'memory' is {codes}: codes .* quantization_config"):
            export_huggingface(MemorySource({"w": torch.ones(2).to(codes)}), out, quantized)
    with pytest.raises(BadInput, match="complex64, which safetensors"):
        export_huggingface(MemorySource({"w": torch.ones(2, dtype=torch.complex64)}), out, PLAIN)
    with pytest.raises(BadInput, match=r"'model\.norm\.weight' is no parameter of the built-in decoder"):
        export_huggingface(source, out, decoder_as_llama(DECODER | {"tie_embeddings": True}, {}, None))
    with pytest.raises(BadInput, match=r"no folder .*/missing' to export 'out' into"):
        export_huggingface(source, tmp_path / "missing" / "out", PLAIN)
    with pytest.raises(BadInput, match=r"no readable config\.json"):
        describe_folder(tmp_path)
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
        with pytest.raises(BadInput, match=r"needs 0\.000 GB, and there are 0\.000 GB free"):
            export_huggingface(source, out, PLAIN)
    assert not list(tmp_path.iterdir())

    out.mkdir()
    with pytest.raises(BadInput, match="exists already"):
        export_huggingface(source, out, PLAIN)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemorySource({name: torch.ones(100) for name in "abc"})
    calls = []

    def full_disk(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            assert [path for path in tmp_path.iterdir() if len(list(path.glob("*.safetensors"))) == 2]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(SaveFailed, match="No space left on device"):
        export_huggingface(source, tmp_path / "out", PLAIN, max_shard_bytes=400)
    assert not list(tmp_path.iterdir())

    monkeypatch.undo()
    monkeypatch.setattr(source, "read", lambda *_: (_ for _ in ()).throw(Damaged("cut off")))
    with pytest.raises(Damaged, match="cut off"):
        export_huggingface(source, tmp_path / "out", PLAIN)
    assert not list(tmp_path.iterdir())


EXPORT_200_MB = """
import resource, sys
from pathlib import Path
import torch
from terrazzo.checkpoint.exporters.dcp import export_dcp
from terrazzo.checkpoint.exporters.huggingface import export_huggingface
from terrazzo.checkpoint.hub_folder import ModelDescription
from terrazzo.checkpoint.source import Source, StateInfo, TensorInfo

class Large(Source):
    format = "made up"
    def __init__(self, tensors, numel):
        super().__init__("nowhere")
        shape = (100, numel // 100)
        info = TensorInfo(shape, {"weight": StateInfo(torch.float32, numel)})
        self.tensors = {f"w{i}": info for i in range(tensors)}
    def _read(self, name, kind, start, stop):
        return torch.ones(stop - start)

def export(source, name):
    folder = Path(sys.argv[1])
    export_huggingface(source, folder / f"{name}-hf", ModelDescription({}), dtype=torch.bfloat16)
    export_dcp(source, folder / f"{name}-dcp")

torch.set_num_threads(1)
export(Large(1, 100), "small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(Large(2, 25_000_000), "large")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
def test_memory_is_a_piece_of_a_tensor(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXPORT_200_MB, str(tmp_path)]
    grown_kib = int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    shutil.rmtree(tmp_path / "large-dcp")
    shutil.rmtree(tmp_path / "large-hf")
    assert grown_kib * 1024 < 100_000_000 + (256 << 20)
    assert grown_kib << 10 < 160 << 20  # pieces of 32 MiB, not a tensor


# -- folders that somebody made ------------------------------------------------------------------------------------

NAMES = ("config.json", "generation_config.json", "tokenizer.json", "vocab.txt", "x.model", "chat_template.jinja")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["link", "folder's link", "pipe", "device", "huge"])
def test_nothing_from_outside_of_the_folder_is_exported(tmp_path: Path, name: str, how: str) -> None:
    folder, secret = tmp_path / "model", tmp_path / "private" / name
    for path in (folder, secret.parent):
        path.mkdir()
    (folder / "config.json").write_text("{}")
    secret.write_text('{"secret": 1}')
    (folder / name).unlink(missing_ok=True)
    if how == "link":
        (folder / name).symlink_to(secret)
    elif how == "folder's link":
        (folder / "own").symlink_to(secret.parent)
        (folder / name).symlink_to(Path("own") / name)
    elif how == "pipe":
        os.mkfifo(folder / name)
    elif how == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).touch()
        os.truncate(folder / name, 1 << 36)
    with pytest.raises(BadInput, match=name):
        describe_folder(folder)


def test_the_cache_of_the_hub_is_exported_as_the_files_it_links_to(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "cache/snapshots/abc", tmp_path / "cache/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in NAMES:
        (blobs / f"of-{name}").write_text(json.dumps({"name": name}))
        (snapshot / name).symlink_to(f"../../blobs/of-{name}")
    (tmp_path / "model").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "model"):
        described = describe_folder(folder)
        assert described.config == {"name": "config.json"}
        assert described.files == {name: json.dumps({"name": name}).encode() for name in NAMES[1:]}


def test_files_of_subfolders_follow_the_same_rule(tmp_path: Path) -> None:
    snapshot, blobs, name = tmp_path / "cache/snapshots/abc", tmp_path / "cache/blobs", "templates/a.jinja"
    (snapshot / "templates").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("12345")
    (snapshot / name).symlink_to("../../../blobs/1")
    assert size_inside(snapshot / name, snapshot) == 5
    (tmp_path / "a.jinja").write_text("secret")
    for target in ("../../../../a.jinja", "../../../../cache/blobs/../../a.jinja", "/etc/passwd"):
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(target)
        with pytest.raises(BadInput, match="is not followed"):
            size_inside(snapshot / name, snapshot)
    (snapshot / "linked").symlink_to(tmp_path)
    with pytest.raises(BadInput, match="is not followed"):
        size_inside(snapshot / "linked" / "a.jinja", snapshot)
