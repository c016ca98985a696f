"""The PyTorch side of tightfit's training methods, as transformers, PEFT and bitsandbytes do them.

    method   weights                                trained
    full     f32                                    all of them
    lora     of `dtype`                             f32 adapters on every linear layer but the head
    qlora    NF4 with double quantisation,          f32 adapters on every linear layer but the head
             the embedding and norms f32

With dtype `bf16` products run under PyTorch's autocast, with `f32` without it. `auto` is the faster of the two: bf16 where the
CPU has instructions for it. Where it has none, PyTorch's bf16 products are loops that take 5 to 100 times as long as MKL's
in f32, so that a step takes minutes. Checkpointing is one checkpoint for each block, not reentrant. A library for torch_method.py and finetune.py; needs torch, transformers and, but for `full`, peft;
for `qlora` bitsandbytes and accelerate.
"""

import contextlib

METHODS = ("full", "lora", "qlora")
DTYPES = ("auto", "bf16", "f32")
RANK, ALPHA = 16, 32


def resolve(dtype):
    """The dtype that `auto` stands for on this CPU."""
    import torch

    if dtype != "auto":
        return dtype
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "f32"


def torch_dtype(name):
    import torch

    return {"bf16": torch.bfloat16, "f32": torch.float32}[name]


def load(folder, method, dtype, checkpointing, adapter=None):
    """The model of a Hugging Face folder, ready to train; `adapter` is a PEFT folder to start from."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"dtype": torch.float32 if method == "full" else torch_dtype(dtype)}
    if method == "qlora":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch_dtype(dtype))
        options["device_map"] = {"": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **options)
    model.config.use_cache = False
    not_reentrant = {"use_reentrant": False}
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=not_reentrant)
    if method != "full":
        model = with_adapter(model, method, checkpointing, not_reentrant, adapter)
    return model.train()


def with_adapter(model, method, checkpointing, checkpointing_options, adapter):
    from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training

    if method == "qlora":
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs=checkpointing_options)
    elif checkpointing:
        model.enable_input_require_grads()
    if adapter:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    return get_peft_model(model, LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"))


def trainable(model):
    """The parameters that are trained, in two groups: weight decay spares vectors, as it does in tightfit."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]


def autocast(dtype):
    import torch

    if dtype == "f32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch_dtype(dtype))


def capabilities():
    """What decides how fast PyTorch's products are on this CPU: without bf16 instructions it emulates them."""
    import torch

    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "mkldnn_bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
    }
