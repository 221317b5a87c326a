"""Jobs of ``transformers.Trainer``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from benchmarks.integrations.training import LENGTH, VOCABULARY, Run, Trained, ended, text_loss, texts

STEPS = 60


def plain(run: Run) -> Trained:
    """SGD with momentum, and the clipping that Trainer has by default."""
    return _train(run, _gpt2(), optim="sgd", optim_args="momentum=0.9", learning_rate=0.2)


def everything(run: Run) -> Trained:
    """Accumulation, bf16, checkpointing of activations, AdamW, evaluation in between, the best model at the end."""
    more: dict[str, Any] = {
        "gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": True, "eval_strategy": "steps",
        "eval_steps": 8, "save_strategy": "steps", "save_steps": 8, "load_best_model_at_end": True,
    }  # fmt: skip
    return _train(run, _gpt2(16), steps=16, **more)


def lora(run: Run) -> Trained:
    """An adapter by peft, AdamW; `min_numel` where the script says it, for tensors are small."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_gpt2(), LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    return _train(run, model, learning_rate=1e-2)


def scaled(run: Run) -> Trained:
    """A GradScaler, put in by hand: on a CPU Trainer has none for fp16."""
    return _train(run, _gpt2(), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def compiled(run: Run) -> Trained:
    """``torch_compile``, without a C++ compiler behind it."""
    return _train(run, _gpt2(), torch_compile=True, torch_compile_backend="aot_eager")


def _gpt2(width: int = 32) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=width, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _train(run: Run, model: Any, scaler: Any = None, steps: int = STEPS, **arguments: Any) -> Trained:
    rows = [{"input_ids": row, "labels": row} for row in texts(2 * 8 * STEPS)]
    saving = {"save_strategy": "steps" if run.saves else "no", "save_steps": steps // 2}
    given = TrainingArguments(
        str(run.folder / ("resumed" if run.resumes else "whole")), use_cpu=True, ddp_backend="gloo", max_steps=steps,
        report_to=[], logging_strategy="no", disable_tqdm=True, max_grad_norm=1.0 if run.usual else 0.0,
        **{"learning_rate": 3e-3, **saving, **arguments},
    )  # fmt: skip
    trainer = Trainer(model, given, train_dataset=rows, eval_dataset=rows[:16])
    if scaler is not None:
        trainer.accelerator.scaler = scaler
    if run.compression is not None:
        from dgc_horovod.torch.integrations.transformers import CompressCallback

        trainer.add_callback(CompressCallback(trainer, run.compression))
    trainer.train(resume_from_checkpoint=str(run.folder / f"whole/checkpoint-{steps // 2}") if run.resumes else None)
    return ended(trainer.model, trainer.optimizer, text_loss(trainer.model))
