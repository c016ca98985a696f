#!/usr/bin/env python3
"""Writes small valid inputs for each fuzz target, and dictionaries of the words in them, from the fixtures and from here.

    python3 fuzz/seeds.py FOLDER        FOLDER/<target>/* and FOLDER/<target>.dict
"""

import json
import pathlib
import struct
import sys

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


# GGUF: docs/gguf.md of ggml-org/ggml.

U8, I8, U32, I32, F32, BOOL, STR, ARRAY, U64 = 0, 1, 4, 5, 6, 7, 8, 9, 10
PACK = {U8: "<B", I8: "<b", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


def gguf_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(kind, value):
    if kind == STR:
        return gguf_string(value)
    if kind == ARRAY:
        element, items = value
        return struct.pack("<IQ", element, len(items)) + b"".join(gguf_value(element, item) for item in items)
    return struct.pack(PACK[kind], value)


def gguf(keys, tensors=(), version=3):
    """`keys`: name to (type, value); `tensors`: name, dimensions as in the file, type, bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    for name, (kind, value) in keys.items():
        head += gguf_string(name) + struct.pack("<I", kind) + gguf_value(kind, value)
    data = b""
    for name, dims, kind, content in tensors:
        data += bytes(-len(data) % 32)
        head += gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += content
    return head + (bytes(-len(head) % 32) + data if tensors else b"")


def llama_keys(architecture="llama", **more):
    keys = {
        "general.architecture": (STR, architecture),
        "llama.context_length": (U32, 64),
        "llama.embedding_length": (U32, 8),
        "llama.block_count": (U32, 1),
        "llama.feed_forward_length": (U32, 4),
        "llama.attention.head_count": (U32, 2),
        "llama.attention.head_count_kv": (U32, 1),
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "llama.rope.freq_base": (F32, 10000.0),
        "llama.rope.dimension_count": (U32, 4),
        "llama.vocab_size": (U32, 3),
    } | more
    return {name.replace("llama.", f"{architecture}."): value for name, value in keys.items()}


def matrices(architecture="llama"):
    """The tensors of the model that `llama_keys` describes."""
    shapes = {"token_embd": [8, 3], "output_norm": [8], "output": [8, 3], "blk.0.attn_norm": [8], "blk.0.ffn_norm": [8]}
    shapes |= {"blk.0.attn_q": [8, 8], "blk.0.attn_k": [8, 4], "blk.0.attn_v": [8, 4], "blk.0.attn_output": [8, 8]}
    shapes |= {"blk.0.ffn_gate": [8, 4], "blk.0.ffn_up": [8, 4], "blk.0.ffn_down": [4, 8]}
    if architecture == "qwen3":
        shapes |= {"blk.0.attn_q_norm": [4], "blk.0.attn_k_norm": [4]}
    for name, dims in shapes.items():
        yield f"{name}.weight", dims, 1, bytes(2 * dims[0] * (dims + [1])[1])
    if architecture == "qwen2":
        for name, size in [("attn_q", 8), ("attn_k", 4), ("attn_v", 4)]:
            yield f"blk.0.{name}.bias", [size], 0, bytes(4 * size)


# Blocks of `ggml-common.h`: number of the type, elements, bytes.
BLOCKS = [(0, 1, 4), (1, 1, 2), (2, 32, 18), (3, 32, 20), (6, 32, 22), (7, 32, 24), (8, 32, 34), (10, 256, 84), (11, 256, 110)]
BLOCKS += [(12, 256, 144), (13, 256, 176), (14, 256, 210), (30, 1, 2), (26, 1, 4), (99, 1, 8)]


def gguf_files():
    kinds = {
        "general.alignment": (U32, 32),
        "signed": (I32, -7),
        "big": (U64, 2**64 - 1),
        "flag": (BOOL, True),
        "bytes": (ARRAY, (U8, [1, 2, 255])),
        "nested": (ARRAY, (ARRAY, [(BOOL, [False, True])])),
        "empty": (ARRAY, (STR, [])),
        "general.type": (STR, "model"),
    }
    yield "kinds", gguf(kinds, version=2)
    blocks = [(f"t{kind}", [elements], kind, bytes(range(size))) for kind, elements, size in BLOCKS]
    yield "blocks", gguf({}, blocks)
    yield "llama", gguf(llama_keys(), list(matrices()))
    divisors = ("rope_freqs.weight", [2], 0, struct.pack("<2f", 1.0, 8.0))
    # Of two pairs, the first is too fast to be scaled, and the second slow enough to be scaled by all of the factor.
    yield "llama3", gguf(llama_keys(**{"llama.rope.freq_base": (F32, 4e6)}), [*matrices(), divisors])
    scaled = {"llama.rope.scaling.type": (STR, "linear"), "llama.rope.scaling.factor": (F32, 4.0)}
    yield "linear", gguf(llama_keys(**scaled), list(matrices()))
    for architecture in ["qwen2", "qwen3"]:
        yield architecture, gguf(llama_keys(architecture), list(matrices(architecture)))


def safetensors_files():
    tensors = {"__metadata__": {"format": "pt"}}
    data = 0
    for dtype, shape, size in [("F32", [2, 3], 24), ("BF16", [2], 4), ("I64", [], 8), ("F16", [0, 4], 0), ("F4", [4], 2), ("F8_E4M3", [1], 1)]:
        tensors[f"a.{dtype}"] = {"dtype": dtype, "shape": shape, "data_offsets": [data, data + size]}
        data += size
    header = compact(tensors)
    yield "file", struct.pack("<Q", len(header)) + header + bytes(data)
    # Bytes of a [3, 32] matrix of each quantised format: docs/quantisation.md.
    sizes = {"int8": 108, "int4": 56, "nf4": 58, "q8_0": 102}
    listed = {name: {"format": name, "shape": [3, 32]} for name in sizes}
    tensors = {"__metadata__": {"tightfit.quantized": compact(listed).decode()}}
    data = 0
    for name, size in sizes.items():
        tensors[name] = {"dtype": "U8", "shape": [size], "data_offsets": [data, data + size]}
        data += size
    header = compact(tensors)
    yield "quantized", struct.pack("<Q", len(header)) + header + bytes(data)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    yield "index", compact({"metadata": {"total_size": 8}, "weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}})


def config_files():
    for path in sorted(FIXTURES.glob("family_*.json")):
        config = json.loads(path.read_text())["config"]
        yield path.stem, compact(config)
        old = {name: value for name, value in config.items() if name != "rope_parameters"}
        rope = config["rope_parameters"]
        old["rope_theta"] = rope.pop("rope_theta")
        old["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        yield path.stem + "_old", compact(old)


# tokenizer.json: as the `tokenizers` crate writes it.

def tokenizer_json(model, **parts):
    tokens = [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}]
    empty = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    return compact({"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens} | empty | parts | {"model": model})


def tokenizer_json_files():
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "a", "b", "ab", "▁", "▁a", "<0x0A>"])}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    bpe |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": [["a", "b"], ["▁", "a"]]}
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<s>", 0.0], ["a", -1.0]], "byte_fallback": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    split = {"type": "Split", "pattern": {"Regex": r"a+| ?[^\s]+|\s+(?!\S)"}, "behavior": "Isolated", "invert": False}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": single + [{"Sequence": {"id": "B", "type_id": 1}}]}
    template["special_tokens"] = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    text = "\0ab a\n\n b  <s>ab".encode()
    yield "bpe", tokenizer_json(bpe, pre_tokenizer=byte_level, decoder=byte_level, post_processor=template) + text
    fallback = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    fallback.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    decoder = {"type": "Sequence", "decoders": fallback}
    yield "metaspace", tokenizer_json(bpe | {"byte_fallback": True}, pre_tokenizer=metaspace, decoder=decoder) + text
    chain = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"}, {"type": "NFC"}, {"type": "Lowercase"}]
    chain += [{"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "StripAccents"}, {"type": "Nmt"}]
    yield "normalizers", tokenizer_json(bpe, normalizer={"type": "Sequence", "normalizers": chain}) + text
    words = [split, {"type": "Digits", "individual_digits": True}, {"type": "Punctuation", "behavior": "Isolated"}]
    words += [{"type": "WhitespaceSplit"}, {"type": "CharDelimiterSplit", "delimiter": "b"}, {"type": "UnicodeScripts"}]
    pieces = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    yield "words", tokenizer_json(bpe, pre_tokenizer={"type": "Sequence", "pretokenizers": words}, decoder=pieces) + text
    bert = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    after = {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]}
    yield "bert", tokenizer_json(bpe, normalizer=bert, pre_tokenizer={"type": "BertPreTokenizer"}, post_processor=after) + text
    yield "unigram", tokenizer_json(unigram) + text
    for name in ["qwen2", "llama3", "spm"]:
        real = json.loads((FIXTURES / f"tokenizers/{name}.json").read_text())
        real["model"] |= {"vocab": vocab, "merges": bpe["merges"]}
        yield name, compact(real | {"added_tokens": real["added_tokens"][:1]}) + text


def tokenizer_gguf_files():
    for model, pre in [("gpt2", "gpt-2"), ("gpt2", "qwen2"), ("gpt2", "llama-bpe"), ("llama", "default")]:
        tokens = ["<s>", "a", "b", "ab", "Ġ", "▁", "▁a", "<0x0A>", "<u>"]
        keys = {
            "tokenizer.ggml.model": (STR, model),
            "tokenizer.ggml.pre": (STR, pre),
            "tokenizer.ggml.tokens": (ARRAY, (STR, tokens)),
            "tokenizer.ggml.token_type": (ARRAY, (I32, [3, 1, 1, 1, 1, 1, 1, 6, 4])),
            "tokenizer.ggml.bos_token_id": (U32, 0),
            "tokenizer.ggml.add_bos_token": (BOOL, True),
            "tokenizer.ggml.add_space_prefix": (BOOL, True),
        }
        if model == "gpt2":
            keys["tokenizer.ggml.merges"] = (ARRAY, (STR, ["a b"]))
        else:
            keys["tokenizer.ggml.scores"] = (ARRAY, (F32, [0.0, -1.0, -2.0, -1.5, 0.0, -1.0, -0.5, 0.0, 0.0]))
        yield f"{model}-{pre}", gguf(keys)


def chat_files():
    templates = json.loads((FIXTURES / "tokenizers/chat.json").read_text())["templates"]
    for name, template in templates.items():
        yield name, template.encode() + b"\0Be brief.\0 What is 1 + 1? \0 2 \0\0And?\0a"
    yield "macro", b"{% macro m(x, n=1) %}{{ x * n }}{% endmacro %}{{ m('a', n=3) }}{{ messages | tojson(indent=2) }}{{ messages[0].content.split(',') }}\0a,b"
    yield "loop", b"{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i is odd %}{% continue %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{{ raise_exception('no') }}"


def data_files():
    lines = [
        {"text": "a b"},
        {"prompt": "a", "completion": "b\né"},
        {"instruction": "a", "input": "b", "output": "c", "x": [1, {"y": None}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
    ]
    file = b"\n".join(map(compact, lines)) + b"\r\n\n"
    for switches, sizes in [(0b00001110, 0x07), (0b11100100, 0x2F), (0b01010000, 0x03)]:
        yield f"lines{switches}", bytes([switches, sizes]) + file
        yield f"text{switches}", bytes([switches | 1, sizes]) + "One line.\r\nAnother, 内存 😀.\n\n\n x".encode()


def rows_files():
    start, target = 1 << 30, 1 << 31
    row = [start | 5, target | 6, target | 7, start | 8, target | 9, 3]
    for rows, size in [(1, 1), (3, 2)]:
        header = b"tfrows01" + struct.pack("<3Q", len(row) - 2, rows, 10)
        yield f"{rows}", header + struct.pack(f"<{len(row)}I", *row) * rows + bytes([size])


# Words that valid inputs have few of, or none.
JSON = "true false null 0 -1 1e999 0.5 4294967295 18446744073709551616 \\u0000 \\ud800 {} [] \"\"".split()
WORDS = {
    "gguf": "output.weight blk.0.attn_q.bias rope.scale_linear split.count none linear model".split(),
    "safetensors": JSON + "tightfit.quantized format int8 int4 nf4 q8_0 BOOL U8 I8 F8_E5M2 I16 U16 F64 C64 F6_E2M3 ../a / \\\\".split(),
    "config": JSON + "yarn dynamic default linear llama3 type rope_type attention_factor mscale use_sliding_window".split(),
    "tokenizer_json": JSON + "MergedWithPrevious MergedWithNext Contiguous Removed Precompiled FixedLength length CTC BPEDecoder NFKC NFD NFKD \\\\p{L} (?i: (?= (?! (?<= \\\\1".split(),
    "tokenizer_gguf": "smollm tekken llama3 tokenizer.ggml.eos_token_id tokenizer.ggml.unknown_token_id tokenizer.ggml.padding_token_id tokenizer.ggml.eot_token_id tokenizer.ggml.add_eos_token tokenizer.chat_template".split(),
    "chat": "{% %} {{ }} {# #} {%- -%} for in if elif else endfor endif set endset macro endmacro call endcall filter endfilter include import block extends do with autoescape raw endraw not is defined none loop.index0 range( dict( namespace( lipsum( cycler( ~ // ** |join |map |select |batch |slice |indent |replace |tojson |items |sort |groupby |format generation endgeneration .strip() .split( .replace( .items() .get( recursive break continue self caller".split(),
    "data": JSON + "refuse role content assistant user system text prompt completion instruction input output messages".split(),
    "rows": ["tfrows01"],
}


def words_of(seed):
    """The strings of a JSON seed, or the words of another one."""
    try:
        value = json.loads(seed.split(b"\0")[0])
    except ValueError:
        value = [word for word in seed.decode(errors="ignore").replace("\0", " ").split() if word.isidentifier()]
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            todo += value
        elif isinstance(value, str):
            yield value


def main():
    out = pathlib.Path(sys.argv[1])
    for target, more in WORDS.items():
        words = set(more)
        (out / target).mkdir(parents=True, exist_ok=True)
        for name, seed in globals()[f"{target}_files"]():
            (out / target / name).write_bytes(seed)
            if len(seed) < 4096:
                words |= {word for word in words_of(seed) if 2 <= len(word) <= 48}
        if "gguf" in target:
            words |= llama_keys().keys()
        quoted = ("".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in word.encode()) for word in sorted(words))
        (out / f"{target}.dict").write_text("".join(f'"{word}"\n' for word in quoted))


if __name__ == "__main__":
    main()
